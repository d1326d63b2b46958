"""The rank that puts the votes of a shrinking group together; see `aiocoll.engine.shrink`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from aiocoll.engine.completed import combine
from aiocoll.engine.control import Note
from aiocoll.engine.diagnosis import cause_of
from aiocoll.engine.quorum import connected, decides, is_majority
from aiocoll.errors import GroupError, PeerLostError

if TYPE_CHECKING:
    from aiocoll.engine.shrink import Agreement, Outcome

__all__ = ["Coordinator"]

#: Seconds a coordinator waits for votes, then for acceptances: as long as a stopped rank may go unnoticed (contract).
BOUND = 6.0
#: Seconds in which a lost rank is to be reached again: one round trip to anywhere takes less, a lost SYN included, and
#: so does a rank whose loop is not blocked.
RETRY = 2.5


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
        self._retried = self._expired = False
        self._timers: list[asyncio.TimerHandle] = []

    def stop(self) -> None:
        """Wait for nobody any more."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def voted(self, peer: int, note: Note) -> None:
        """Take a vote, or take it again."""
        agreement, ballot = self._agreement, note["ballot"]
        agreement.endpoint.restored(peer)
        if agreement.outcome is not None:
            agreement.say_decided(peer)
            return
        if ballot > self._ballot and agreement.promise(ballot):
            self._ballot, self._votes, self._proposal, self._acks = ballot, {}, None, set()
        if ballot < max(self._ballot, agreement.promised):
            self._ask([peer])
            return
        first = not self._votes
        self._votes[peer] = note
        if first:
            self._begin(peer)
        self.consider()
        if agreement.outcome is None:
            self._answer(peer)

    def _begin(self, first: int) -> None:
        """After the first vote, ask the others for theirs, or tell them what was proposed already."""
        agreement = self._agreement
        me = agreement.endpoint.rank
        self._await_bounds()
        if self._proposal is not None:
            self._say_proposal(agreement.ranks)
            return
        self._ask(rank for rank in agreement.ranks if rank not in (first, me))
        if first != me:
            agreement.cast()

    def _answer(self, voter: int) -> None:
        """Tell a voter what has come of its vote. Who has not called needs to know nothing: it would vote again."""
        if self._proposal is not None:
            self._say_proposal([voter])
        elif (vote := self._votes.get(voter)) is not None and vote["candidacy"] is not None:
            self._ask([voter])

    def _ask(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._agreement.say(rank, {"what": "ask", "ballot": max(self._ballot, self._agreement.promised)})

    def _say_proposal(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._agreement.say(rank, {"what": "propose", "ballot": self._ballot, "outcome": self._proposal})

    def _await_bounds(self) -> None:
        self._retried = self._expired = False
        self.stop()
        call_later = self._agreement.endpoint.runtime.call_later
        self._timers = [call_later(RETRY, self._retry), call_later(BOUND, self._expire)]

    def _retry(self) -> None:
        self._retried = True
        ranks = self._agreement.ranks
        if self._proposal is None:
            self._ask([rank for rank in ranks if rank not in self._votes])
        else:
            self._say_proposal([rank for rank in ranks if rank not in self._acks])
        self.consider()

    def _expire(self) -> None:
        self._expired = True
        self.consider()

    def consider(self) -> None:
        """Propose, decide or give up, if it is time."""
        agreement = self._agreement
        if not self._votes or agreement.outcome is not None or agreement.promised != self._ballot:
            return
        away = agreement.away
        if self._proposal is not None:
            if decides(self._acks, agreement.ranks, away):
                for rank in agreement.ranks:
                    agreement.say(rank, {"what": "decided", "outcome": self._proposal})
            elif self._expired:
                self._give_up(self._acks)
            return
        candidates, wanted = self._candidates(), self._wanted()
        members = connected(candidates, {rank: self._candidacy(rank)["lost"] for rank in candidates})
        hopeless = self._hopeless()
        promised = decides(self._votes.keys(), agreement.ranks, away)
        open_questions = (wanted - candidates - hopeless) or (len(members) < len(candidates) and not self._retried)
        missing = set(agreement.ranks) - away - self._votes.keys() - hopeless
        if not self._expired and (open_questions or (missing and not promised)):
            return
        if promised and is_majority(members, wanted):
            self._propose(members)
        else:
            self._give_up(members)

    def _candidates(self) -> set[int]:
        """Return who has voted to go on, and may."""
        unfit = self._excluded() | self._agreement.away
        return {rank for rank, vote in self._votes.items() if vote["candidacy"] is not None and rank not in unfit}

    def _candidacy(self, rank: int) -> Note:
        candidacy: Note = self._votes[rank]["candidacy"]
        return candidacy

    def _wanted(self) -> set[int]:
        """Return who should vote to go on: all that live, have not closed the group and are not excluded."""
        agreement = self._agreement
        group = agreement.endpoint.groups.get(agreement.group)
        left = set() if group is None else {group.ranks[rank] for rank in group.left}
        return (set(agreement.ranks) - agreement.away - self._excluded() - left) | self._candidates()

    def _hopeless(self) -> set[int]:
        """Return who is not waited for: stopped ranks, and lost ones that could not be reached again."""
        lost = self._agreement.endpoint.dead
        return {rank for rank, (how, _) in lost.items() if self._retried or how == "stopped"}

    def _excluded(self) -> set[int]:
        votes = (vote["candidacy"] for vote in self._votes.values())
        return {rank for candidacy in votes if candidacy is not None for rank in candidacy["exclude"]}

    def _propose(self, members: list[int]) -> None:
        accepted = [vote["accepted"] for vote in self._votes.values()] + [self._agreement.accepted]
        _, outcome = max(filter(None, accepted), key=lambda one: one[0], default=(-1, None))
        if outcome is None:
            everywhere, somewhere = combine([self._candidacy(rank)["completed"] for rank in members])
            outcome = {
                "members": members,
                "excluded": sorted(self._excluded()),
                "everywhere": everywhere.told(),
                "somewhere": somewhere.told(),
            }
        self._proposal = outcome
        self._await_bounds()
        self._say_proposal(self._agreement.ranks)

    def accepted(self, peer: int, note: Note) -> None:
        """Take an acceptance of the proposal."""
        if note["ballot"] == self._ballot:
            self._acks.add(peer)
            self.consider()

    def _give_up(self, reached: Collection[int]) -> None:
        """Tell those that have voted who is missing; they may call again."""
        agreement = self._agreement
        missing = sorted(self._wanted() - set(reached)) or sorted(
            set(agreement.ranks) - agreement.away - self._votes.keys()
        )
        error: GroupError
        if missing:
            here, there = agreement.named(reached or [agreement.endpoint.rank]), agreement.named(missing)
            numbers = [agreement.position(rank) for rank in missing]
            error = PeerLostError(
                f"{here} cannot shrink the group: they are no quorum without {there}, which could not be reached or "
                "did not call shrink(), and which may be going on by themselves (if it is certain that they are dead: "
                f"shrink(assume_dead={numbers}))",
                how="unreachable",
                ranks=numbers,
            )
        else:
            error = GroupError("the group cannot shrink: together the ranks have excluded all of them")
        votes, self._votes = self._votes, {}
        self.stop()
        for rank in votes:
            agreement.say(rank, {"what": "refuse", "ballot": self._ballot, "cause": cause_of(error)})
