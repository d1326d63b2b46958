"""Agreement of a group's ranks on the successor group: a single decision, which survives the death of any rank.

A failed group shrinks to some of its ranks. A growing group continues in a larger group, in which its ranks have met
the newcomers: either all its ranks continue there, or none. Both are decided the same way, so one part of a group
cannot shrink while another part grows. A group that has grown may shrink or grow again. Every growth starts the next
decision.

The protocol is Paxos over the control plane. A rank whose program calls `shrink` sends its vote to a coordinator: the
lowest rank that answers. With the vote, the rank promises to accept no proposal of a lower ballot. The coordinator
requests the promises of all other ranks, including ranks whose program has not called `shrink` or has closed the
group. Those promise and accept, but are no candidates. When all candidates that can vote have voted (or, after a
time limit, enough of them), the coordinator proposes the candidates that can reach each other. A quorum of
acceptances decides. A new coordinator repeats a proposal that a voter has accepted already, since a rank may have
returned with its outcome. `aiocoll.engine.consensus.quorum` defines a quorum and proves that two decisions never
differ.

A rank whose connection broke, or that was silent, is dialled again first, and votes if it can be reached. A rank
repeats its vote when something changes, and at intervals. The coordinator answers with its current state, so a lost
message does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.control.causes import error_from
from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.job.ids import group_id
from aiocoll.errors import GroupClosedError, GroupError

if TYPE_CHECKING:
    from aiocoll.engine.consensus.coordinator import Coordinator

__all__ = ["Outcome", "Voter"]

#: A decision as plain data: members, excluded ranks, completed operations, and the name of the grown group, if any.
Outcome = dict[str, Any]

#: Seconds after which a voter without a decision votes again. A coordinator that has not answered by then is skipped.
PROMPT = 2.0


class Voter:
    """The participant of one rank in the agreement on the successor of one group.

    The endpoint owns the voter, since the voter may outlive the group. Ranks in this module are numbered as in the job.

    Args:
        parts: the parts of the endpoint that the voter uses.
        identity: the group's id.
        number: number of times the group has grown.
        ranks: the group's ranks.

    Attributes:
        parts, number, ranks: as given.
        group: the group's id.
        outcome: the decision, once this rank knows it.
        accepted: the ballot and outcome of the proposal that this rank accepted last.
        promised: the highest ballot that this rank has promised; -1 before the first.
        assumed: ranks declared dead by a program.
        moved: ranks that ended after they had continued in the successor.
        taken: whether this rank has continued in the successor.
    """

    _coordinator: Coordinator

    def __init__(self, parts: Parts, identity: int, number: int, ranks: Sequence[int]) -> None:
        self.outcome: Outcome | None = None
        self.parts = parts
        self.rank = parts.context.rank
        self.group = identity
        self.number = number
        self.ranks = tuple(ranks)
        self.taken = False
        self.accepted: tuple[int, Outcome] | None = None
        # The number of the ballot for which this rank has promised its vote. The ballot's coordinator is the rank
        # `ballot % world_size`.
        self.promised = -1
        self.assumed: set[int] = set()
        self.moved: set[int] = set()
        self._candidacy: ControlMessage | None = None
        self._waiter: asyncio.Future[Outcome] | None = None
        self._answered = False
        self._silent: set[int] = set()
        self._reminder: asyncio.TimerHandle | None = None

    def connect(self, coordinator: Coordinator) -> None:
        """Set the coordinator for ballots that this rank coordinates."""
        self._coordinator = coordinator

    @property
    def away(self) -> set[int]:
        """Return the ranks that can no longer take part: proven dead, ended, or declared dead by the program."""
        ranks = self.parts.ranks
        suspected = ranks.suspected_ranks
        return {
            rank
            for rank in self.ranks
            if rank in self.assumed or (rank in ranks.gone and rank not in suspected and rank not in self.moved)
        }

    @property
    def doubted_ranks(self) -> set[int]:
        """Return the ranks whose death is doubted: they count as dead unless they prove that they are alive."""
        return self.parts.ranks.doubted_ranks.intersection(self.ranks) - self.assumed

    async def shrink(self, exclude: Iterable[int], assume_dead: Iterable[int], completed: dict[str, Any]) -> Outcome:
        """Agree with the other ranks on the members of the successor group, without lost ranks.

        Args:
            exclude: ranks to continue without.
            assume_dead: ranks declared dead by the program.
            completed: this rank's report on completed operations.

        Raises:
            GroupError: this rank is excluded, or the others continued without it.
            PeerLostError: no quorum could be reached.
        """
        self.assumed.update(assume_dead)
        candidacy = {"exclude": sorted({*exclude, *self.assumed}), "completed": completed}
        outcome = await self._decide(candidacy)
        self._check_membership(outcome)
        self.set_taken()
        return outcome

    async def grow(self, successor: str) -> None:
        """Agree with the other ranks to continue in `successor`, the larger group with the newcomers.

        Raises:
            GroupError: a rank has not met the newcomers, the group has failed, or the other ranks have shrunk it.
        """
        outcome = await self._decide({"grown": successor})
        if outcome["grown"] != successor:
            others = self.format_ranks(outcome["members"])
            raise GroupError(f"the group did not grow: {others} continued without the newcomers; call shrink()")
        self.set_taken()

    def set_taken(self) -> None:
        """Record that this rank has started to use the successor group."""
        self.taken = True

    def decline(self, successor: str, reason: str) -> None:
        """Report to the other ranks that this rank could not meet the newcomers for the group `successor`."""
        if self.outcome is None and self._waiter is None:
            self._candidacy = {"failed": reason, "successor": successor}
            self._choose_ballot()
            self._send_vote()

    async def _decide(self, candidacy: ControlMessage) -> Outcome:
        """Vote, and wait for the decision of the ballot."""
        if self._waiter is not None:
            raise RuntimeError("shrink() or grow() of this group is already in progress; await that call")
        self._waiter = self.parts.context.loop.create_future()
        self._candidacy = candidacy
        self._silent.clear()
        try:
            if self.outcome is not None:
                self._waiter.set_result(self.outcome)
            else:
                self._reach_lost()
                self._vote_as_candidate()
            outcome = await self._waiter
            if (why := self.parts.ranks.own_death) is not None:
                raise self._declared_dead_error(why)
            return outcome
        finally:
            self._waiter = self._candidacy = None
            self._stop_reminder()

    def identity(self, members: Sequence[int]) -> int:
        """Return the id of the successor group: a hash of the decision, so different decisions give different ids."""
        return group_id(f"{self.group}\0{self.number}\0{list(members)}")

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Handle a message from `peer`."""
        if peer in self.away:
            if self.outcome is not None:
                self.parts.links.send_direct(
                    peer, self._add_common_fields({"what": "decided", "outcome": self.outcome})
                )
            return
        handler = {
            "vote": self._coordinator.on_vote,
            "ask": self._on_request,
            "propose": self._on_proposal,
            "accept": self._coordinator.on_acceptance,
            "decided": self._on_decision,
            "refuse": self._on_refusal,
        }[message["what"]]
        for rank, why in message["dead"]:
            self.parts.ranks.record_loss(rank, why, notify=False)
        self.assumed.update(message["assumed"])
        handler(peer, message)

    def on_change(self) -> None:
        """Repeat the vote and reconsider the ballot, since a rank was lost, has ended, or is reachable again."""
        if self.outcome is None:
            if self._waiter is not None:
                self._vote_as_candidate()
            self._coordinator.consider()

    def vote(self) -> None:
        """Vote in the promised ballot: as a candidate if the program has called `shrink` or `grow`."""
        if self._waiter is not None:
            self._vote_as_candidate()
        else:
            self._send_vote()

    def run_step(self, step: Callable[[], None]) -> None:
        """Run a timer's callback. If the callback raises an exception, fail the waiting call and revoke the group."""
        try:
            step()
        except Exception as error:
            if (group := self.parts.groups.get(self.group)) is not None:
                group.revoke_after_crash(error)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)

    def withdraw(self) -> None:
        """Stop waiting for a decision, because this rank has left the group."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(
                GroupClosedError("this rank closed the group while shrink() or grow() was waiting")
            )

    def close(self) -> None:
        """Close this voter, because its rank is ending. Send a goodbye to ranks that may continue with this rank."""
        self._stop_reminder()
        self._coordinator.stop()
        outcome = self.outcome or (self.accepted and self.accepted[1])
        if outcome and not self.taken and not outcome["grown"] and self.rank in outcome["members"]:
            message = {"t": "bye", "g": self.identity(outcome["members"]), "cause": None, "linked": False}
            self.parts.send_to_others(message, outcome["members"])

    def promise(self, ballot: int) -> bool:
        """Promise this rank's vote to its own ballot `ballot`; return False after a promise to a higher ballot."""
        if ballot > self.promised:
            self.promised = ballot
        return ballot == self.promised

    def _vote_as_candidate(self) -> None:
        """Vote to continue: in the promised ballot, or in a new ballot of the lowest rank that may answer."""
        if (why := self.parts.ranks.own_death) is not None:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(self._declared_dead_error(why))
            return
        self._choose_ballot()
        self._stop_reminder()
        self._reminder = self.parts.context.runtime.call_later(PROMPT, self.run_step, self._repeat_vote)
        self._send_vote()

    def _declared_dead_error(self, why: str) -> GroupError:
        """Return the error to raise on a rank that other ranks have declared dead."""
        me = self.position(self.rank)
        text = (
            f"rank {me} was declared dead by other ranks: {why}; close the group, and join again with "
            "new_group(join=True)"
        )
        return GroupError(text, ranks=[me])

    def _choose_ballot(self) -> None:
        """Keep the promised ballot if its coordinator may answer; otherwise promise a ballot of another rank."""
        size = self.parts.context.world_size
        if self.promised < 0 or not self._may_answer(self.promised % size):
            # A rank is always found, because this rank can answer its own vote.
            coordinator = next(rank for rank in self.ranks if self._may_answer(rank))
            rounds = (self.promised - coordinator) // size + 1
            self.promised = max(0, rounds) * size + coordinator

    def _send_vote(self) -> None:
        candidacy = self._candidacy
        if candidacy is not None:
            candidacy = {**candidacy, "lost": sorted(self.parts.ranks.suspected_ranks.intersection(self.ranks))}
        vote = {"what": "vote", "ballot": self.promised, "candidacy": candidacy, "accepted": self.accepted}
        self.send(self.promised % self.parts.context.world_size, vote)

    def _may_answer(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        excluded = () if self._candidacy is None else self._candidacy.get("exclude", ())
        return not (rank in self._silent or rank in excluded or rank in self.away)

    def _reach_lost(self) -> None:
        ranks = self.parts.ranks
        for rank in (ranks.suspected_ranks.intersection(self.ranks) - self.away) | self.doubted_ranks:
            self.parts.links.probe(rank)

    def _repeat_vote(self) -> None:
        """Repeat the vote. Skip a coordinator that has not answered the last vote: it is blocked or disconnected."""
        coordinator = self.promised % self.parts.context.world_size
        if not self._answered and coordinator != self.rank:
            self._silent |= {coordinator, *self.parts.ranks.suspected_ranks}
        self._answered = False
        for rank in set(self.ranks) - self.away - {self.rank}:
            self.parts.look(rank)
        self._reach_lost()
        self._vote_as_candidate()

    def _on_request(self, peer: int, message: ControlMessage) -> None:
        """Handle a coordinator's request to vote in its ballot, or its reply to this rank's vote."""
        if self.outcome is not None:
            self.send_decision(peer)
        elif message["ballot"] == self.promised:
            self._answered = True
            if self._waiter is None:
                self._send_vote()
        elif message["ballot"] > self.promised:
            self.promised = message["ballot"]
            self._silent.discard(peer)
            self.vote()

    def _on_proposal(self, peer: int, message: ControlMessage) -> None:
        if self.outcome is not None:
            self.send_decision(peer)
        elif message["ballot"] >= self.promised:
            self.promised = message["ballot"]
            self.accepted = message["ballot"], message["outcome"]
            self._answered = True
            self.send(peer, {"what": "accept", "ballot": message["ballot"]})

    def _on_decision(self, peer: int, message: ControlMessage) -> None:
        if self.outcome is not None:
            return
        self.outcome = message["outcome"]
        self._stop_reminder()
        self._coordinator.stop()
        members = message["outcome"]["members"]
        group = self.parts.groups.get(self.group)
        if message["outcome"]["grown"]:
            if group is not None:
                group.growths = self.number + 1
        elif group is not None:
            text = f"{self.format_ranks(members)} of group {group.name!r} continued as a new group"
            group.revoke(GroupError(text, group=group.name), notify=False)
        if self.rank in members and not message["outcome"]["grown"]:
            for rank in members:
                self.parts.ranks.record_return(rank)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(message["outcome"])

    def _on_refusal(self, peer: int, message: ControlMessage) -> None:
        if message["ballot"] == self.promised and self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error_from(message["cause"]))

    def _check_membership(self, outcome: Outcome) -> None:
        me = self.rank
        others = self.format_ranks(outcome["members"])
        if outcome["grown"]:
            raise GroupError(
                f"rank {self.position(me)} was left out: {others} continued in a larger group that this rank has not "
                "made; close the group, and join again with new_group(join=True)",
                ranks=[self.position(me)],
            )
        if me in outcome["members"]:
            return
        why = (
            "was excluded"
            if me in outcome["excluded"]
            else "was unreachable for some ranks, was declared dead, or called shrink() after the decision"
        )
        raise GroupError(
            f"rank {self.position(me)} {why}: {others} continued without it; close the group, and join again "
            "with new_group(join=True)",
            ranks=[self.position(me)],
        )

    # -- sending

    def send_to_all(self, message: ControlMessage) -> None:
        """Send `message` to all ranks of the group. Lost ranks learn from the message that they are excluded."""
        for rank in self.ranks:
            self.send(rank, message)

    def send_decision(self, rank: int) -> None:
        """Send the decision to `rank`."""
        self.send(rank, {"what": "decided", "outcome": self.outcome})

    def send(self, rank: int, message: ControlMessage) -> None:
        """Send `message` to `rank`, which may be this rank itself."""
        message = self._add_common_fields(message)
        if rank == self.rank:
            self.handle(rank, message)
        elif rank not in self.away:
            self.parts.links.send_direct(rank, message)

    def _add_common_fields(self, message: ControlMessage) -> ControlMessage:
        """Add the group, and the ranks that are away (proven dead, ended or declared dead) to `message`."""
        ranks = self.parts.ranks
        # A rank that was itself declared dead reports no other deaths.
        known = self.ranks if ranks.own_death is None else [self.rank]
        dead = [(rank, why) for rank, (how, why) in ranks.dead.items() if how == "killed" and rank in known]
        assumed = sorted(self.assumed)
        about = {"t": "shrink", "g": self.group, "n": self.number, "ranks": list(self.ranks)}
        return {**about, "dead": dead, "assumed": assumed, **message}

    def position(self, rank: int) -> int:
        """Return the number of `rank` in the group, as used in error messages."""
        return self.ranks.index(rank)

    def format_ranks(self, ranks: Iterable[int]) -> str:
        """Return `ranks` as text, such as "ranks 0, 2"."""
        numbers = sorted(map(self.position, ranks))
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

    def _stop_reminder(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
