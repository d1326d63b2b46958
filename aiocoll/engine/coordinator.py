"""The rank that puts the votes of a shrinking group together; see `aiocoll.engine.shrink`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiocoll.engine.completed import combine
from aiocoll.engine.diagnosis import cause_of
from aiocoll.engine.notes import Note
from aiocoll.errors import GroupError, PeerLostError

if TYPE_CHECKING:
    from aiocoll.engine.shrink import Agreement, Outcome

__all__ = ["Coordinator", "is_quorum"]

#: Seconds a coordinator waits for votes, then for acceptances: as long as a stopped rank may go unnoticed (contract).
BOUND = 6.0


def is_quorum(ranks: Iterable[int], electorate: Iterable[int]) -> bool:
    """Whether `ranks` decide for `electorate`: more than half of it, or exactly half with its lowest."""
    voters = set(electorate)
    found = voters & set(ranks)
    return 2 * len(found) > len(voters) or (bool(found) and 2 * len(found) == len(voters) and min(voters) in found)


class Coordinator:
    """Coordinates one ballot at a time: the one with the highest number that a voter has chosen.

    Args:
        agreement: this rank's part as a voter.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._ballot = -1
        self._votes: dict[int, Note] = {}
        self._proposal: Outcome | None = None
        self._acks: set[int] = set()
        self._expired = False
        self._bound: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Wait for nobody any more."""
        if self._bound is not None:
            self._bound.cancel()

    def voted(self, peer: int, note: Note) -> None:
        """Take a vote, or take it again."""
        agreement, ballot = self._agreement, note["ballot"]
        if agreement.outcome is None and agreement.endpoint.control.is_gone(peer):
            error = GroupError(
                f"rank {agreement.position(peer)} cannot shrink its group: the others have lost it ("
                f"{agreement.endpoint.dead.get(peer, ('left', 'it has ended'))[1]}) and go on without it",
                ranks=[agreement.position(peer)],
            )
            agreement.say(peer, {"what": "refuse", "ballot": ballot, "cause": cause_of(error)})
            return
        for rank, why in note["dead"]:
            agreement.endpoint.died(rank, why)
        if ballot > self._ballot:
            self._ballot, self._votes, self._proposal, self._acks = ballot, {}, None, set()
        if agreement.outcome is None and ballot == self._ballot:
            first = not self._votes
            self._votes[peer] = note
            if first:
                self._await_bound()
                agreement.tell_all({"what": "ask", "ballot": ballot})
            self.consider()
        self._answer(peer)

    def _answer(self, voter: int) -> None:
        """Tell a voter what has come of its vote."""
        if self._agreement.outcome is not None:
            self._agreement.say(voter, {"what": "decided", "outcome": self._agreement.outcome})
        elif self._proposal is not None:
            self._agreement.say(voter, {"what": "propose", "ballot": self._ballot, "outcome": self._proposal})
        else:
            self._agreement.say(voter, {"what": "ask", "ballot": self._ballot})

    def _await_bound(self) -> None:
        self._expired = False
        self.stop()
        self._bound = self._agreement.endpoint.runtime.call_later(BOUND, self._agreement.attempt, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self.consider()

    def _electorate(self) -> set[int]:
        """Return who has a say: neither proven dead nor ended, neither excluded nor out of the group of old."""
        endpoint = self._agreement.endpoint
        group = endpoint.groups.get(self._agreement.group)
        left = set() if group is None else {group.ranks[rank] for rank in group.left} - self._votes.keys()
        excluded = self._excluded()
        return {
            rank
            for rank in self._agreement.ranks
            if rank not in left
            and rank not in excluded
            and (rank in endpoint.suspected or not endpoint.control.is_gone(rank))
        }

    def _excluded(self) -> set[int]:
        return {rank for vote in self._votes.values() for rank in vote["exclude"]}

    def consider(self) -> None:
        """Propose, decide or give up, if it is time."""
        if not self._votes or self._agreement.outcome is not None:
            return
        electorate = self._electorate()
        if self._proposal is not None:
            if is_quorum(self._acks, electorate):
                self._agreement.tell_all({"what": "decided", "outcome": self._proposal})
            elif self._expired:
                self._give_up(electorate, self._acks)
            return
        voters = self._votes.keys() & electorate
        if electorate - voters - self._agreement.endpoint.suspected and not self._expired:
            return
        if is_quorum(voters, electorate):
            self._propose(voters)
        else:
            self._give_up(electorate, voters)

    def _propose(self, voters: set[int]) -> None:
        accepted = [vote["accepted"] for vote in self._votes.values()] + [self._agreement.accepted]
        _, outcome = max(filter(None, accepted), key=lambda one: one[0], default=(-1, None))
        if outcome is None:
            everywhere, somewhere = combine([self._votes[rank]["completed"] for rank in voters])
            outcome = {
                "members": sorted(voters),
                "excluded": sorted(self._excluded()),
                "everywhere": everywhere.told(),
                "somewhere": somewhere.told(),
            }
        self._proposal = outcome
        self._await_bound()
        self._agreement.tell_all({"what": "propose", "ballot": self._ballot, "outcome": outcome})

    def accepted(self, peer: int, note: Note) -> None:
        """Take an acceptance of the proposal."""
        if note["ballot"] == self._ballot:
            self._acks.add(peer)
            self.consider()

    def _give_up(self, electorate: set[int], voters: Iterable[int]) -> None:
        """Tell those that have voted who is missing; they may call again."""
        agreement = self._agreement
        missing = sorted(electorate - set(voters))
        error: GroupError
        if missing:
            here, there = agreement.named(voters), agreement.named(missing)
            error = PeerLostError(
                f"{here} cannot shrink the group: they are no quorum without {there}, which could not be reached or "
                "did not call shrink(), and which may be going on by themselves",
                how="unreachable",
                ranks=[agreement.position(rank) for rank in missing],
            )
        else:
            error = GroupError("the group cannot shrink: together the ranks have excluded all of them")
        votes, self._votes = self._votes, {}
        self.stop()
        for rank in votes:
            agreement.say(rank, {"what": "refuse", "ballot": self._ballot, "cause": cause_of(error)})
