"""How the ranks of a revoked group agree on who goes on: a single decision that survives the death of any of them.

It is Paxos over the control plane, with the ballots handed out by circumstance. Every rank whose program calls
`shrink` votes at the rank it takes for the coordinator, the lowest one alive; the vote is the promise not to accept
from a coordinator with a lower ballot. When all ranks have voted that can (or, after a bound, a quorum), the
coordinator proposes the voters; they accept, and with the acceptances of a quorum it is decided. A coordinator that
takes over proposes again what a voter has accepted already, since somebody may have returned with it.

Who is proven dead, has ended, or is excluded has no say: more than half of the others is a quorum, or exactly half
with the lowest of them. Votes are said again when a rank dies and from time to time, and answered by whatever the
coordinator has come to, so a note lost with the rank that relayed it does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.engine.coordinator import Coordinator
from aiocoll.engine.diagnosis import error_from
from aiocoll.engine.notes import Note
from aiocoll.errors import GroupError

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["Agreement", "Outcome"]

#: Seconds after which a vote is said again, and a coordinator that has not answered one is passed over.
PROMPT = 2.0

#: What is decided: the members, who was excluded, what was completed; plain data.
Outcome = dict[str, Any]


class Agreement:
    """One rank's part in the decision about one group. It belongs to the endpoint, since it may outlive the group.

    Args:
        endpoint: what connects this rank to the others.
        identity: the group.
        ranks: of the group, numbered as in the job, as everywhere in here.

    Attributes:
        endpoint, group, ranks: as given.
        outcome: the decision, once this rank knows it.
        accepted: the ballot and the proposal this rank accepted last.
        taken: this rank has made the group that goes on.
    """

    def __init__(self, endpoint: Endpoint, identity: int, ranks: Sequence[int]) -> None:
        self.outcome: Outcome | None = None
        self.endpoint = endpoint
        self.group = identity
        self.ranks = tuple(ranks)
        self.taken = False
        self.accepted: tuple[int, Outcome] | None = None
        # A ballot is a number whose remainder by the world size is its coordinator.
        self._vote: Note | None = None
        self._waiter: asyncio.Future[Outcome] | None = None
        self._promised = -1
        self._answered = False
        self._silent: set[int] = set()
        self._prompt: asyncio.TimerHandle | None = None
        self._coordinator = Coordinator(self)

    async def vote(self, exclude: Iterable[int], completed: dict[str, Any]) -> Outcome:
        """Take part; return what is decided.

        Args:
            exclude: ranks to go on without.
            completed: this rank's report.

        Raises:
            GroupError: this rank is excluded, or the others went on without it.
            PeerLostError: no quorum could be reached.
        """
        if self._waiter is not None:
            raise RuntimeError("shrink() of this group is under way already: await that call")
        self._waiter = self.endpoint.loop.create_future()
        self._vote = {"exclude": sorted(exclude), "completed": completed}
        self._silent.clear()
        try:
            if self.outcome is not None:
                self._waiter.set_result(self.outcome)
            else:
                self._cast()
            outcome = await self._waiter
        finally:
            self._waiter = self._vote = None
            self._stop()
        self._check_membership(outcome)
        self.taken = True
        return outcome

    def identity(self, members: Sequence[int]) -> int:
        """Return the id of the group that goes on: no other decision, not even a wrong one, gives the same."""
        return self.endpoint.hash62(f"{self.group}\0{list(members)}") & 0xFFFFFFFF

    def heard(self, peer: int, note: Note) -> None:
        """Take a note of `peer`."""
        handler = {
            "vote": self._coordinator.voted,
            "ask": self._asked,
            "propose": self._proposed,
            "accept": self._coordinator.accepted,
            "decided": self._decided,
            "refuse": self._refused,
        }[note["what"]]
        handler(peer, note)

    def changed(self) -> None:
        """A rank has died or ended: it may be the coordinator, or the relay that has lost a note."""
        if self.outcome is None:
            if self._waiter is not None:
                self._cast()
            self._coordinator.consider()

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step of its own accord: what it raises ends the wait for a decision, and the group if it stands."""
        try:
            step()
        except Exception as error:
            if (group := self.endpoint.groups.get(self.group)) is not None:
                group.crashed(error)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)

    def close(self) -> None:
        """This rank ends; if others go on with it, they must not wait for it."""
        self._stop()
        self._coordinator.stop()
        outcome = self.outcome or (self.accepted and self.accepted[1])
        if outcome and not self.taken and self.endpoint.rank in outcome["members"]:
            note = {"t": "bye", "g": self.identity(outcome["members"]), "cause": None, "linked": False}
            self.endpoint.control.flood(note, outcome["members"])

    def _cast(self) -> None:
        """Vote: where one has promised to, or at the lowest rank that may answer."""
        assert self._vote is not None
        size = self.endpoint.world_size
        if self._promised < 0 or not self._may_answer(self._promised % size):
            # Never empty: this rank answers itself.
            coordinator = next(rank for rank in self.ranks if self._may_answer(rank))
            rounds = (self._promised - coordinator) // size + 1
            self._promised = max(0, rounds) * size + coordinator
        self._stop()
        self._prompt = self.endpoint.runtime.call_later(PROMPT, self.attempt, self._remind)
        self.say(
            self._promised % size,
            {
                "what": "vote",
                **self._vote,
                "ballot": self._promised,
                "accepted": self.accepted,
                "dead": [(rank, why) for rank, (how, why) in self.endpoint.dead.items() if how == "killed"],
            },
        )

    def _may_answer(self, rank: int) -> bool:
        if rank == self.endpoint.rank:
            return True
        assert self._vote is not None
        return not (rank in self._silent or rank in self._vote["exclude"] or self.endpoint.control.is_gone(rank))

    def _remind(self) -> None:
        """Say the vote again; a coordinator that has not answered the last one is blocked, or cut off."""
        coordinator = self._promised % self.endpoint.world_size
        if not self._answered and coordinator != self.endpoint.rank:
            self._silent.add(coordinator)
        self._answered = False
        self._cast()

    def _asked(self, peer: int, note: Note) -> None:
        """A coordinator lets us know its ballot, or that it has our vote."""
        if self.outcome is not None:
            self.say(peer, {"what": "decided", "outcome": self.outcome})
        elif note["ballot"] == self._promised:
            self._answered = True
        elif note["ballot"] > self._promised:
            self._promised = note["ballot"]
            self._silent.discard(peer)
            if self._waiter is not None:
                self._cast()

    def _proposed(self, peer: int, note: Note) -> None:
        if note["ballot"] >= self._promised and self.outcome is None:
            self._promised = note["ballot"]
            self.accepted = note["ballot"], note["outcome"]
            self._answered = True
            self.say(peer, {"what": "accept", "ballot": note["ballot"]})

    def _decided(self, peer: int, note: Note) -> None:
        if self.outcome is None:
            self.outcome = note["outcome"]
            self._stop()
            self._coordinator.stop()
            group = self.endpoint.groups.get(self.group)
            if group is not None:
                others = self.named(note["outcome"]["members"])
                group.revoke(
                    GroupError(f"{others} of group {group.name!r} went on as a new group", group=group.name), tell=False
                )
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(note["outcome"])

    def _refused(self, peer: int, note: Note) -> None:
        if note["ballot"] == self._promised and self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error_from(note["cause"]))

    def _check_membership(self, outcome: Outcome) -> None:
        me = self.endpoint.rank
        if me in outcome["members"]:
            return
        others = self.named(outcome["members"])
        why = (
            "was excluded"
            if me in outcome["excluded"]
            else "was taken for dead, or called shrink() when they had decided"
        )
        raise GroupError(
            f"rank {self.position(me)} {why}: {others} went on without it; close the group, and join again "
            "with new_group(join=True)",
            ranks=[self.position(me)],
        )

    # -- saying

    def tell_all(self, note: Note) -> None:
        """Say `note` to all ranks, the lost ones too if they can be reached: they learn that they are out."""
        for rank in self.ranks:
            self.say(rank, note)

    def say(self, rank: int, note: Note) -> None:
        """Say `note` to `rank`, be it this one."""
        note = {"t": "shrink", "g": self.group, "ranks": list(self.ranks), **note}
        if rank == self.endpoint.rank:
            self.heard(rank, note)
        else:
            self.endpoint.control.tell(rank, note)

    def position(self, rank: int) -> int:
        """Return the number of `rank` in the group, which is what error messages use."""
        return self.ranks.index(rank)

    def named(self, ranks: Iterable[int]) -> str:
        """Name `ranks` in words."""
        numbers = sorted(map(self.position, ranks))
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

    def _stop(self) -> None:
        if self._prompt is not None:
            self._prompt.cancel()
