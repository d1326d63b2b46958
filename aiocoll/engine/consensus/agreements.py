"""The voters of one endpoint: one `Voter` per group whose ranks agree on a successor group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from aiocoll.engine.consensus.coordinator import Coordinator
from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.consensus.voter import Voter
from aiocoll.engine.control.messages import ControlMessage

__all__ = ["Agreements"]


class Agreements:
    """A table of the voters of one endpoint, by group.

    Each voter decides which group succeeds one group. Group ids may collide, so the key of a voter also has the number
    of growths and the ranks. A voter may outlive its group: it is kept until all ranks have left the group, since only
    then no rank can vote to continue.

    Args:
        parts: the parts of the endpoint that voters use.
        record_name: callback that records a group id received from a peer. Its arguments are the id and the peer. It
            returns False if all ranks of the group have left.

    Attributes:
        parts: as given.
        voters: by group id, number of growths, and ranks.
    """

    def __init__(self, parts: Parts, record_name: Callable[[int, int], bool]) -> None:
        self.parts = parts
        self._record_name = record_name
        self.voters: dict[tuple[int, int, tuple[int, ...]], Voter] = {}

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        """Return this rank's voter for a group; make the voter if there is none.

        Args:
            identity: the group's id.
            number: how often the group has grown.
            ranks: the group's ranks, numbered as in the job.
        """
        key = identity, number, tuple(ranks)
        found = self.voters.get(key)
        if found is None:
            found = self.voters[key] = Voter(self.parts, identity, number, ranks)
            found.connect(Coordinator(found))
        return found

    def withdraw(self, identity: int, ranks: Sequence[int]) -> None:
        """Let pending `shrink` and `grow` calls of a group fail, because this rank leaves the group."""
        for (group, _, members), voter in self.voters.items():
            if group == identity and members == tuple(ranks):
                voter.withdraw()

    def drop_group(self, identity: int, ranks: Collection[int]) -> None:
        """Close the voters of a group that all ranks have left."""
        for key in [key for key in self.voters if key[0] == identity and set(key[2]) == set(ranks)]:
            self.voters.pop(key).close()

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Pass a message from `peer` to the voter of its group."""
        identity, number, ranks = message["g"], message["n"], message["ranks"]
        if (identity, number, tuple(ranks)) in self.voters or self._record_name(identity, peer):
            self.voter(identity, number, ranks).handle(peer, message)

    def record_moved(self, rank: int, moved: Iterable[int]) -> None:
        """Record that `rank` has ended, after it had continued in the successors of the groups `moved`."""
        for identity in moved:
            if (group := self.parts.groups.get(identity)) is not None:
                self.voter(identity, group.growths, group.ranks).moved.add(rank)

    def moved_groups(self) -> list[int]:
        """Return the ids of groups that this rank has left for a successor group."""
        return [identity for (identity, _, _), voter in self.voters.items() if voter.taken]

    def on_change(self) -> None:
        """Let every voter react to a rank that was lost, has ended, or is reachable again."""
        for voter in list(self.voters.values()):
            voter.on_change()

    def close(self) -> None:
        """Close all voters, since this rank is ending."""
        for voter in self.voters.values():
            voter.close()
