"""The agreements that one rank takes part in: each decides what succeeds one group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from aiocoll.engine.consensus.coordinator import Coordinator
from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.consensus.voter import Voter
from aiocoll.engine.control.messages import ControlMessage

__all__ = ["Agreements"]


class Agreements:
    """The voters of one endpoint.

    Args:
        parts: what the voters need of the endpoint.
        named: called with the id of a group that a rank has mentioned, and that rank: the group may be unknown here;
            returns False if all its ranks have left the group.

    Attributes:
        parts: as given.
        voters: by group, how many times that group had grown, and its ranks: ids may collide. A voter may outlive the
            group, until all ranks have left it: then none of them can vote to continue.
    """

    def __init__(self, parts: Parts, named: Callable[[int, int], bool]) -> None:
        self.parts = parts
        self._named = named
        self.voters: dict[tuple[int, int, tuple[int, ...]], Voter] = {}

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        """Return this rank's voter for a group; it may outlive the group.

        Args:
            identity: the group.
            number: how many times it had grown.
            ranks: of the group, numbered as in the job.
        """
        key = identity, number, tuple(ranks)
        found = self.voters.get(key)
        if found is None:
            found = self.voters[key] = Voter(self.parts, identity, number, ranks)
            found.connect(Coordinator(found))
        return found

    def left(self, identity: int, ranks: Sequence[int]) -> None:
        """This rank leaves a group: it votes no more to continue."""
        for (group, _, members), voter in self.voters.items():
            if group == identity and members == tuple(ranks):
                voter.withdraw()

    def forget(self, identity: int, ranks: Collection[int]) -> None:
        """All ranks have left a group."""
        for key in [key for key in self.voters if key[0] == identity and set(key[2]) == set(ranks)]:
            self.voters.pop(key).close()

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Handle a message of `peer`."""
        identity, number, ranks = message["g"], message["n"], message["ranks"]
        if (identity, number, tuple(ranks)) in self.voters or self._named(identity, peer):
            self.voter(identity, number, ranks).handle(peer, message)

    def finished(self, rank: int, moved: Iterable[int]) -> None:
        """A rank has ended; it had continued elsewhere from the groups `moved`."""
        for identity in moved:
            if (group := self.parts.groups.get(identity)) is not None:
                self.voter(identity, group.growths, group.ranks).moved.add(rank)

    def moved(self) -> list[int]:
        """Return the groups from which this rank has continued in a successor."""
        return [identity for (identity, _, _), voter in self.voters.items() if voter.taken]

    def changed(self) -> None:
        """A rank was lost, has ended, or is reachable again."""
        for voter in list(self.voters.values()):
            voter.changed()

    def close(self) -> None:
        """This rank is ending."""
        for voter in self.voters.values():
            voter.close()
