"""The agreements that one rank takes part in: each decides what succeeds one group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiocoll.engine.consensus.coordinator import Coordinator
from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.consensus.voter import Voter
from aiocoll.engine.control.messages import ControlMessage

__all__ = ["Agreements"]


class Agreements:
    """The voters of one endpoint.

    Args:
        parts: what the voters need of the endpoint.
        named: called with the id of a group that a rank has mentioned, and that rank: the group may be unknown here.

    Attributes:
        parts: as given.
        voters: by group, and how many times that group had grown.
    """

    def __init__(self, parts: Parts, named: Callable[[int, int], None]) -> None:
        self.parts = parts
        self._named = named
        self.voters: dict[tuple[int, int], Voter] = {}

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        """Return this rank's voter for a group; it may outlive the group.

        Args:
            identity: the group.
            number: how many times it had grown.
            ranks: of the group, numbered as in the job.
        """
        found = self.voters.get((identity, number))
        if found is None:
            found = self.voters[identity, number] = Voter(self.parts, identity, number, ranks)
            found.connect(Coordinator(found))
        return found

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Handle a message of `peer`."""
        identity, number = message["g"], message["n"]
        if (identity, number) not in self.voters:
            self._named(identity, peer)
        self.voter(identity, number, message["ranks"]).handle(peer, message)

    def finished(self, rank: int, moved: Iterable[int]) -> None:
        """A rank has ended; it had continued elsewhere from the groups `moved`."""
        for identity in moved:
            if (group := self.parts.groups.get(identity)) is not None:
                self.voter(identity, group.growths, group.ranks).moved.add(rank)

    def moved(self) -> list[int]:
        """Return the groups from which this rank has continued in a successor."""
        return [identity for (identity, _), voter in self.voters.items() if voter.taken]

    def changed(self) -> None:
        """A rank was lost, has ended, or is reachable again."""
        for voter in list(self.voters.values()):
            voter.changed()

    def close(self) -> None:
        """This rank is ending."""
        for voter in self.voters.values():
            voter.close()
