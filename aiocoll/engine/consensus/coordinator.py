"""Coordinator of an agreement: it collects votes, proposes a successor group, and decides. See `consensus.voter`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from aiocoll.engine.consensus.completed import combine
from aiocoll.engine.consensus.quorum import can_decide, connected, is_majority
from aiocoll.engine.consensus.voter import Outcome, Voter
from aiocoll.engine.control.causes import cause_of
from aiocoll.engine.control.messages import PROTOCOL, ControlMessage
from aiocoll.errors import GroupError, PeerLostError

__all__ = ["Coordinator"]

#: Seconds to wait for votes, and then again for acceptances. The documented limit until a stopped rank is detected is 6
#: s.
BOUND = 6.0
#: Seconds for which a lost rank is tried again: longer than any round trip, even with a lost SYN packet, and longer
#: than a rank needs to reply if its loop is not blocked.
RETRY = 2.5
#: Template for the outcome of an agreement, without members. `grown` is the name of the grown group, if there is one.
EMPTY: Outcome = {"members": [], "excluded": [], "everywhere": None, "somewhere": None, "grown": ""}


class Coordinator:
    """The coordinator on one rank. It runs one ballot at a time: the ballot with the highest number that a voter chose.

    Args:
        agreement: this rank's own voter.
    """

    def __init__(self, agreement: Voter) -> None:
        self._agreement = agreement
        self._ballot = -1
        self._votes: dict[int, ControlMessage] = {}
        self._proposal: Outcome | None = None
        self._acks: set[int] = set()
        self._retried = self._expired = False
        self._timers: list[asyncio.TimerHandle] = []

    def stop(self) -> None:
        """Stop waiting for votes and acceptances."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def on_vote(self, peer: int, message: ControlMessage) -> None:
        """Handle a new or repeated vote of `peer`."""
        agreement, ballot = self._agreement, message["ballot"]
        agreement.parts.ranks.record_return(peer)
        if agreement.outcome is not None:
            agreement.send_decision(peer)
            return
        if ballot > self._ballot and agreement.promise(ballot):
            self._ballot, self._votes, self._proposal, self._acks = ballot, {}, None, set()
        if ballot < max(self._ballot, agreement.promised):
            self._request_votes([peer])
            return
        first = not self._votes
        self._votes[peer] = message
        if first:
            self._begin_ballot(peer)
        self.consider()
        if agreement.outcome is None:
            self._reply(peer)

    def _begin_ballot(self, first: int) -> None:
        """Start a ballot after its first vote: request the votes of the other ranks, or repeat an earlier proposal."""
        agreement = self._agreement
        me = agreement.rank
        self._start_timers()
        if self._proposal is not None:
            self._send_proposal(agreement.ranks)
            return
        self._request_votes(rank for rank in agreement.ranks if rank not in (first, me))
        if first != me:
            agreement.vote()

    def _reply(self, voter: int) -> None:
        """Send the proposal or a vote request to `voter`, if this voter waits for a decision.

        A voter that does not wait would answer a request with another vote, and so on without end.
        """
        if self._proposal is not None:
            self._send_proposal([voter])
        elif voter in self._voters_with("exclude") | self._voters_with("grown"):
            self._request_votes([voter])

    def _request_votes(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._agreement.send(rank, {"what": "ask", "ballot": max(self._ballot, self._agreement.promised)})

    def _send_proposal(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._agreement.send(rank, {"what": "propose", "ballot": self._ballot, "outcome": self._proposal})

    def _start_timers(self) -> None:
        self._retried = self._expired = False
        self.stop()
        call_later, attempt = self._agreement.parts.context.runtime.call_later, self._agreement.run_step
        self._timers = [call_later(RETRY, attempt, self._retry), call_later(BOUND, attempt, self._expire)]

    def _retry(self) -> None:
        self._retried = True
        ranks = self._agreement.ranks
        if self._proposal is None:
            self._request_votes([rank for rank in ranks if rank not in self._votes])
        else:
            self._send_proposal([rank for rank in ranks if rank not in self._acks])
        self.consider()

    def _expire(self) -> None:
        self._expired = True
        self.consider()

    def consider(self) -> None:
        """Take the next step of the ballot, if one is due: propose a successor group, decide, or give up."""
        agreement = self._agreement
        if not self._votes or agreement.outcome is not None or agreement.promised != self._ballot:
            return
        if agreement.parts.ranks.own_death is not None:
            return
        if self._proposal is not None:
            if self._may_decide(self._acks):
                agreement.send_to_all({"what": "decided", "outcome": self._proposal})
            elif self._expired:
                self._give_up(self._acks)
            return
        promised = self._may_decide(self._votes.keys())
        if promised and (accepted := self._accepted()) is not None:
            self._propose(accepted)
        else:
            self._consider_growth()
            if self._voters_with("exclude"):
                self._consider_shrinking(promised)

    def _may_decide(self, ranks: Collection[int]) -> bool:
        """Return whether `ranks` are a quorum. While a death is doubted, a quorum is a majority of the job."""
        agreement = self._agreement
        if agreement.doubted_ranks:
            return is_majority(ranks, range(agreement.parts.context.world_size))
        return can_decide(ranks, agreement.ranks, agreement.away)

    def _consider_growth(self) -> None:
        """Propose the grown group if all ranks have made it, or send an error if the group cannot grow."""
        agreement = self._agreement
        grown = self._voters_with("grown")
        if not grown:
            return
        groups = {self._candidacy(rank)["grown"] for rank in grown}
        if len(groups) == 1 and grown == set(agreement.ranks):
            self._propose({**EMPTY, "members": sorted(grown), "grown": groups.pop()})
            return
        declined = map(self._candidacy, self._voters_with("failed"))
        failed = [each["failed"] for each in declined if each["successor"] in groups]
        absent = set(agreement.ranks) & (agreement.away | agreement.parts.ranks.suspected_ranks)
        if failed or absent or self._expired or len(groups) > 1 or self._voters_with("exclude"):
            reason = failed[0] if failed else "some of its ranks could not meet the newcomers"
            self._refuse(grown, GroupError(f"the group did not grow: {reason}"))

    def _consider_shrinking(self, promised: bool) -> None:
        """Propose a group of the ranks that continue, or wait for more votes, or give up if there is no quorum."""
        agreement = self._agreement
        candidates, wanted, hopeless = self._candidates(), self._expected(), self._unreachable()
        members = connected(candidates, {rank: self._candidacy(rank)["lost"] for rank in candidates})
        waiting = (wanted - candidates - hopeless) or (len(members) < len(candidates) and not self._retried)
        waiting = waiting or (not promised and agreement.doubted_ranks)
        missing = set(agreement.ranks) - agreement.away - self._votes.keys() - hopeless
        if not self._expired and (waiting or (missing and not promised)):
            return
        if not promised or not is_majority(members, wanted):
            self._give_up(members)
            return
        everywhere, somewhere = combine([self._candidacy(rank)["completed"] for rank in members])
        combined = {"everywhere": everywhere.as_data(), "somewhere": somewhere.as_data()}
        self._propose({**EMPTY, "members": members, "excluded": sorted(self._excluded()), **combined})

    def _voters_with(self, what: str) -> set[int]:
        """Return the voters whose candidacy has the field `what`: "exclude", "grown" or "failed"."""
        votes = self._votes.items()
        return {rank for rank, vote in votes if vote["candidacy"] is not None and what in vote["candidacy"]}

    def _accepted(self) -> Outcome | None:
        """Return the outcome that a voter accepted in the highest ballot, or None. It may already be the decision."""
        accepted = [vote["accepted"] for vote in self._votes.values() if vote["accepted"] is not None]
        found: Outcome | None = max(accepted, key=lambda one: one[0], default=(-1, None))[1]
        return found

    def _candidates(self) -> set[int]:
        """Return the ranks that voted to continue and are not excluded."""
        return self._voters_with("exclude") - self._excluded() - self._agreement.away

    def _candidacy(self, rank: int) -> ControlMessage:
        candidacy: ControlMessage = self._votes[rank]["candidacy"]
        return candidacy

    def _expected(self) -> set[int]:
        """Return the ranks expected to vote to continue: alive, not excluded, and still in the group."""
        agreement = self._agreement
        group = agreement.parts.groups.get(agreement.group)
        left = set() if group is None else {group.ranks[rank] for rank in group.left}
        return (set(agreement.ranks) - agreement.away - self._excluded() - left) | self._candidates()

    def _unreachable(self) -> set[int]:
        """Return the ranks whose votes are not awaited: stopped, rejected, or unreachable even after a retry."""
        lost = self._agreement.parts.ranks.dead
        return {rank for rank, (how, _) in lost.items() if self._retried or how in ("stopped", PROTOCOL)}

    def _excluded(self) -> set[int]:
        return {rank for voter in self._voters_with("exclude") for rank in self._candidacy(voter)["exclude"]}

    def _propose(self, outcome: Outcome) -> None:
        self._proposal = outcome
        self._start_timers()
        self._send_proposal(self._agreement.ranks)

    def on_acceptance(self, peer: int, message: ControlMessage) -> None:
        """Handle the acceptance of the proposal by `peer`."""
        if message["ballot"] == self._ballot:
            self._acks.add(peer)
            self.consider()

    def _give_up(self, reached: Collection[int]) -> None:
        """Send the voters an error that names the missing ranks; the voters may call again."""
        agreement = self._agreement
        missing = sorted(self._expected() - set(reached)) or sorted(
            set(agreement.ranks) - agreement.away - self._votes.keys()
        )
        error: GroupError
        if missing:
            here, there = agreement.format_ranks(reached or [agreement.rank]), agreement.format_ranks(missing)
            numbers = [agreement.position(rank) for rank in missing]
            error = PeerLostError(
                f"{here} cannot shrink the group: no quorum without {there}. The missing ranks could not be reached "
                "or did not call shrink(), and may continue as a group of their own. If they are certainly dead, call "
                f"shrink(assume_dead={numbers})",
                how="unreachable",
                ranks=numbers,
            )
        else:
            error = GroupError("the group cannot shrink: the calls of shrink() together exclude every rank")
        self._refuse(self._votes, error)
        self._votes = {}
        self.stop()

    def _refuse(self, voters: Iterable[int], error: GroupError) -> None:
        """Send `error` to `voters`, whose calls raise the error. Their promises stay valid, and they may call again."""
        voters = list(voters)
        for rank in voters:
            self._votes[rank] = {**self._votes[rank], "candidacy": None}
        for rank in voters:
            self._agreement.send(rank, {"what": "refuse", "ballot": self._ballot, "cause": cause_of(error)})
