"""The decisions that one rank takes part in: each about what comes after one group."""

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
        parts: what they need of the endpoint.
        named: called with a group of which a rank has spoken, and that rank: this rank may not have made it.

    Attributes:
        parts: as given.
        voters: by group, and how often that has grown before.
    """

    def __init__(self, parts: Parts, named: Callable[[int, int], None]) -> None:
        self.parts = parts
        self._named = named
        self.voters: dict[tuple[int, int], Voter] = {}

    def voter(self, identity: int, number: int, ranks: Sequence[int]) -> Voter:
        """Return this rank's part in what the ranks of a group decide; it may outlive the group.

        Args:
            identity: the group.
            number: how often it has grown before.
            ranks: of the group, as in the job.
        """
        found = self.voters.get((identity, number))
        if found is None:
            found = self.voters[identity, number] = Voter(self.parts, identity, number, ranks)
            found.connect(Coordinator(found))
        return found

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Take a message of `peer`."""
        identity, number = message["g"], message["n"]
        if (identity, number) not in self.voters:
            self._named(identity, peer)
        self.voter(identity, number, message["ranks"]).handle(peer, message)

    def finished(self, rank: int, moved: Iterable[int]) -> None:
        """A rank has ended, which went on elsewhere from the groups `moved`."""
        for identity in moved:
            if (group := self.parts.groups.get(identity)) is not None:
                self.voter(identity, group.growths, group.ranks).moved.add(rank)

    def moved(self) -> list[int]:
        """Return the groups from which this rank has gone on to another."""
        return [identity for (identity, _), voter in self.voters.items() if voter.taken]

    def changed(self) -> None:
        """A rank was lost, has ended, or is back."""
        for voter in list(self.voters.values()):
            voter.changed()

    def close(self) -> None:
        """This rank ends."""
        for voter in self.voters.values():
            voter.close()
