"""How the ranks of a group agree on its successor: a single decision that survives the death of any of them.

A failed group shrinks to some of its ranks. A group that grows continues in a larger one, where its ranks have met the
newcomers, on all ranks or on none; both are decided the same way, so no part of it shrinks while another grows. A
group that has grown may shrink or grow again; every growth starts the next decision.

The protocol is Paxos over the control plane. Every rank whose program calls `shrink` votes at the rank it considers
the coordinator, the lowest one that answers; the vote is the promise not to accept from a coordinator with a lower
ballot. The coordinator asks all other ranks for their promise, including those whose program has not called, or has
closed the group: these promise and accept, but are no candidates. When all candidates that can vote have voted (or,
after a bound, enough of them), the coordinator proposes those that can reach each other; a quorum of acceptances
decides. A coordinator that takes over repeats the proposal that a voter has accepted already, since a rank may
have returned with it. `aiocoll.engine.consensus.quorum` defines a quorum and shows why no two decisions differ.

A rank whose connection broke, or that was silent, is dialled again first: it votes if it can be reached. Votes are
repeated when something changes and from time to time, and are answered with the coordinator's current state, so a
message lost with a connection does no harm.
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

#: What is decided: members, excluded ranks, completed operations, and the larger group if it grew; plain data.
Outcome = dict[str, Any]

#: Seconds after which a vote is repeated, and after which a coordinator that has not answered one is skipped.
PROMPT = 2.0


class Voter:
    """One rank's part in the agreement about one group. It belongs to the endpoint, since it may outlive the group.

    Args:
        parts: what connects this rank to the others.
        identity: the group.
        number: how many times the group had grown.
        ranks: of the group, numbered as in the job, as everywhere in this module.

    Attributes:
        parts, group, number, ranks: as given.
        outcome: the decision, once this rank knows it.
        accepted: the ballot and the proposal this rank accepted last.
        promised: the highest ballot this rank has promised; -1 before the first.
        assumed: ranks declared dead by a program.
        moved: ranks that have ended after they continued in the successor.
        taken: this rank has made the successor.
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
        # A ballot is a number whose remainder by the world size is its coordinator.
        self.promised = -1
        self.assumed: set[int] = set()
        self.moved: set[int] = set()
        self._candidacy: ControlMessage | None = None
        self._waiter: asyncio.Future[Outcome] | None = None
        self._answered = False
        self._silent: set[int] = set()
        self._prompt: asyncio.TimerHandle | None = None

    def connect(self, coordinator: Coordinator) -> None:
        """Set the coordinator that acts when this rank has to coordinate."""
        self._coordinator = coordinator

    @property
    def away(self) -> set[int]:
        """Ranks that can no longer take part: proven dead, ended, or declared dead by a program."""
        ranks = self.parts.ranks
        suspected = ranks.suspected
        return {
            rank
            for rank in self.ranks
            if rank in self.assumed or (rank in ranks.over and rank not in suspected and rank not in self.moved)
        }

    @property
    def doubted(self) -> set[int]:
        """Ranks that are away unless they show that they live after all."""
        return self.parts.ranks.doubted.intersection(self.ranks) - self.assumed

    async def shrink(self, exclude: Iterable[int], assume_dead: Iterable[int], completed: dict[str, Any]) -> Outcome:
        """Agree with the other ranks on which of them continue.

        Args:
            exclude: ranks to continue without.
            assume_dead: ranks declared dead by the program.
            completed: this rank's report.

        Raises:
            GroupError: this rank is excluded, or the others continued without it.
            PeerLostError: no quorum could be reached.
        """
        self.assumed.update(assume_dead)
        candidacy = {"exclude": sorted({*exclude, *self.assumed}), "completed": completed}
        outcome = await self._decision(candidacy)
        self._check_membership(outcome)
        self.go_on()
        return outcome

    async def grow(self, successor: str) -> None:
        """Agree with the other ranks to continue in the larger group `successor`, in which this rank has met them.

        Raises:
            GroupError: a rank has not met them, the group has failed, or the others have shrunk it.
        """
        outcome = await self._decision({"grown": successor})
        if outcome["grown"] != successor:
            others = self.named(outcome["members"])
            raise GroupError(f"the group did not grow: {others} went on without the newcomers; call shrink()")
        self.go_on()

    def go_on(self) -> None:
        """This rank makes the successor."""
        self.taken = True

    def decline(self, successor: str, reason: str) -> None:
        """Tell the others that this rank has not met the newcomers in `successor`."""
        if self.outcome is None and self._waiter is None:
            self._candidacy = {"failed": reason, "successor": successor}
            self._choose()
            self._say_vote()

    async def _decision(self, candidacy: ControlMessage) -> Outcome:
        """Vote, and wait for the decision."""
        if self._waiter is not None:
            raise RuntimeError("shrink() of this group is under way already: await that call")
        self._waiter = self.parts.context.loop.create_future()
        self._candidacy = candidacy
        self._silent.clear()
        try:
            if self.outcome is not None:
                self._waiter.set_result(self.outcome)
            else:
                self._reach_lost()
                self._cast()
            outcome = await self._waiter
            if (why := self.parts.ranks.out) is not None:
                raise self._out(why)
            return outcome
        finally:
            self._waiter = self._candidacy = None
            self._stop()

    def identity(self, members: Sequence[int]) -> int:
        """Return the id of the successor: unique to this decision, so that not even a wrong one has the same id."""
        return group_id(f"{self.group}\0{self.number}\0{list(members)}")

    def handle(self, peer: int, message: ControlMessage) -> None:
        """Handle a message of `peer`."""
        if peer in self.away:
            if self.outcome is not None:
                self.parts.links.send(peer, self._signed({"what": "decided", "outcome": self.outcome}))
            return
        handler = {
            "vote": self._coordinator.voted,
            "ask": self._asked,
            "propose": self._proposed,
            "accept": self._coordinator.accepted,
            "decided": self._decided,
            "refuse": self._refused,
        }[message["what"]]
        for rank, why in message["dead"]:
            self.parts.ranks.died(rank, why, tell=False)
        self.assumed.update(message["assumed"])
        handler(peer, message)

    def changed(self) -> None:
        """A rank was lost, has ended, or is reachable again: it may be the coordinator, or have lost a message."""
        if self.outcome is None:
            if self._waiter is not None:
                self._cast()
            self._coordinator.consider()

    def cast(self) -> None:
        """Vote in the promised ballot; as a candidate if the program has called."""
        if self._waiter is not None:
            self._cast()
        else:
            self._say_vote()

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step that no message caused: an exception ends the wait for a decision, and revokes a usable group."""
        try:
            step()
        except Exception as error:
            if (group := self.parts.groups.get(self.group)) is not None:
                group.crashed(error)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)

    def withdraw(self) -> None:
        """This rank has left the group: end the wait for a decision."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(
                GroupClosedError("this rank has closed the group while shrink() or grow() waited")
            )

    def close(self) -> None:
        """This rank is ending; if the others continue with it, they must not wait for it."""
        self._stop()
        self._coordinator.stop()
        outcome = self.outcome or (self.accepted and self.accepted[1])
        if outcome and not self.taken and not outcome["grown"] and self.rank in outcome["members"]:
            message = {"t": "bye", "g": self.identity(outcome["members"]), "cause": None, "linked": False}
            self.parts.flood(message, outcome["members"])

    def promise(self, ballot: int) -> bool:
        """As coordinator of `ballot`, promise it before anything else; False if a higher one is promised already."""
        if ballot > self.promised:
            self.promised = ballot
        return ballot == self.promised

    def _cast(self) -> None:
        """Vote as a candidate: in the promised ballot, or at the lowest rank that may answer."""
        if (why := self.parts.ranks.out) is not None:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(self._out(why))
            return
        self._choose()
        self._stop()
        self._prompt = self.parts.context.runtime.call_later(PROMPT, self.attempt, self._remind)
        self._say_vote()

    def _out(self, why: str) -> GroupError:
        """Return the error of a rank that other ranks take for dead."""
        me = self.position(self.rank)
        text = (
            f"rank {me} is out, for the others take it for dead: {why}; close the group, and join again with "
            "new_group(join=True)"
        )
        return GroupError(text, ranks=[me])

    def _choose(self) -> None:
        """Promise a ballot of a rank that may answer."""
        size = self.parts.context.world_size
        if self.promised < 0 or not self._may_answer(self.promised % size):
            # Never empty: this rank may always answer itself.
            coordinator = next(rank for rank in self.ranks if self._may_answer(rank))
            rounds = (self.promised - coordinator) // size + 1
            self.promised = max(0, rounds) * size + coordinator

    def _say_vote(self) -> None:
        candidacy = self._candidacy
        if candidacy is not None:
            candidacy = {**candidacy, "lost": sorted(self.parts.ranks.suspected.intersection(self.ranks))}
        vote = {"what": "vote", "ballot": self.promised, "candidacy": candidacy, "accepted": self.accepted}
        self.say(self.promised % self.parts.context.world_size, vote)

    def _may_answer(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        excluded = () if self._candidacy is None else self._candidacy.get("exclude", ())
        return not (rank in self._silent or rank in excluded or rank in self.away)

    def _reach_lost(self) -> None:
        ranks = self.parts.ranks
        for rank in (ranks.suspected.intersection(self.ranks) - self.away) | self.doubted:
            self.parts.links.reach(rank)

    def _remind(self) -> None:
        """Repeat the vote; a coordinator that has not answered the last one is blocked or disconnected."""
        coordinator = self.promised % self.parts.context.world_size
        if not self._answered and coordinator != self.rank:
            self._silent |= {coordinator, *self.parts.ranks.suspected}
        self._answered = False
        for rank in set(self.ranks) - self.away - {self.rank}:
            self.parts.look(rank)
        self._reach_lost()
        self._cast()

    def _asked(self, peer: int, message: ControlMessage) -> None:
        """A coordinator announces its ballot, or acknowledges this rank's vote."""
        if self.outcome is not None:
            self.say_decided(peer)
        elif message["ballot"] == self.promised:
            self._answered = True
            if self._waiter is None:
                self._say_vote()
        elif message["ballot"] > self.promised:
            self.promised = message["ballot"]
            self._silent.discard(peer)
            self.cast()

    def _proposed(self, peer: int, message: ControlMessage) -> None:
        if self.outcome is not None:
            self.say_decided(peer)
        elif message["ballot"] >= self.promised:
            self.promised = message["ballot"]
            self.accepted = message["ballot"], message["outcome"]
            self._answered = True
            self.say(peer, {"what": "accept", "ballot": message["ballot"]})

    def _decided(self, peer: int, message: ControlMessage) -> None:
        if self.outcome is not None:
            return
        self.outcome = message["outcome"]
        self._stop()
        self._coordinator.stop()
        members = message["outcome"]["members"]
        group = self.parts.groups.get(self.group)
        if message["outcome"]["grown"]:
            if group is not None:
                group.growths = self.number + 1
        elif group is not None:
            text = f"{self.named(members)} of group {group.name!r} went on as a new group"
            group.revoke(GroupError(text, group=group.name), tell=False)
        if self.rank in members and not message["outcome"]["grown"]:
            for rank in members:
                self.parts.ranks.restored(rank)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(message["outcome"])

    def _refused(self, peer: int, message: ControlMessage) -> None:
        if message["ballot"] == self.promised and self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error_from(message["cause"]))

    def _check_membership(self, outcome: Outcome) -> None:
        me = self.rank
        others = self.named(outcome["members"])
        if outcome["grown"]:
            raise GroupError(
                f"rank {self.position(me)} is out: {others} have agreed to go on in a larger group, which this rank "
                "has not made; close the group, and join again with new_group(join=True)",
                ranks=[self.position(me)],
            )
        if me in outcome["members"]:
            return
        why = (
            "was excluded"
            if me in outcome["excluded"]
            else "could not be reached by all, was taken for dead, or called shrink() when they had decided"
        )
        raise GroupError(
            f"rank {self.position(me)} {why}: {others} went on without it; close the group, and join again "
            "with new_group(join=True)",
            ranks=[self.position(me)],
        )

    # -- sending

    def tell_all(self, message: ControlMessage) -> None:
        """Send `message` to all ranks; even lost ones, if reachable, so that they learn that they are excluded."""
        for rank in self.ranks:
            self.say(rank, message)

    def say_decided(self, rank: int) -> None:
        """Tell `rank` the decision."""
        self.say(rank, {"what": "decided", "outcome": self.outcome})

    def say(self, rank: int, message: ControlMessage) -> None:
        """Send `message` to `rank`, which may be this rank itself."""
        message = self._signed(message)
        if rank == self.rank:
            self.handle(rank, message)
        elif rank not in self.away:
            self.parts.links.send(rank, message)

    def _signed(self, message: ControlMessage) -> ControlMessage:
        """Add to `message` the fields common to all: the group, and which ranks are away by proof or by declaration."""
        ranks = self.parts.ranks
        # A rank that is out sends no notice of other deaths.
        known = self.ranks if ranks.out is None else [self.rank]
        dead = [(rank, why) for rank, (how, why) in ranks.dead.items() if how == "killed" and rank in known]
        assumed = sorted(self.assumed)
        about = {"t": "shrink", "g": self.group, "n": self.number, "ranks": list(self.ranks)}
        return {**about, "dead": dead, "assumed": assumed, **message}

    def position(self, rank: int) -> int:
        """Return the number of `rank` in the group, as used in error messages."""
        return self.ranks.index(rank)

    def named(self, ranks: Iterable[int]) -> str:
        """Return `ranks` as text."""
        numbers = sorted(map(self.position, ranks))
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

    def _stop(self) -> None:
        if self._prompt is not None:
            self._prompt.cancel()
