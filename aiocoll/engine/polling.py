"""Busy polling: how long an await polls before it suspends, and a turn of the loop before the rank sleeps.

Polling finds new data within a fraction of a microsecond, a wake-up through the kernel takes twenty. So an await polls
for `spin_us`, and so does a turn of the loop in which peers were sending; a rank that receives nothing sleeps.

Whoever polls keeps the core, and a peer that the kernel has put on the same one cannot send meanwhile, as it does where
another process keeps the other cores busy: an exchange of 8 B then takes 120 µs, not 7. So ranks that share a core take
turns (`sched_yield`); and since both want to run all the time, the kernel moves one to a core that becomes free.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from aiocoll.completion import Completion
from aiocoll.engine.job.context import Context
from aiocoll.engine.stray_posts import StrayPosts
from aiocoll.runtime import BUDGET
from aiocoll.transport.base import Link
from aiocoll.transport.shared_memory import PeerOutbox

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.interfaces import Looker

__all__ = ["Polling"]

#: An await that completes at once yields a turn of the loop when the last turn is this many seconds ago (contract).
TURN: Final = 500e-6
#: Seconds after which an await that polls looks whether a peer is on the same core; most are over before.
DOUBT: Final = 5e-6
#: Readers called between two readings of the clock: each takes about half a microsecond, or a small reduction.
SOME: Final = 8


class Polling:
    """The polling of one endpoint.

    Args:
        context: of the endpoint.
        groups: of the endpoint.
        spin: seconds to poll without result; 0 where a peer shares this process.
        crowded: more ranks on this host than cores: yield the core between polls.

    Attributes:
        links: the links to poll.
        lookers: operations that look into shared memory whenever there is time.
        outboxes: of the peers on this host.
        readers: operations that look when something was posted to a slot.
        stray_posts: finds what was posted for no operation of this rank.
        spun: an await has polled without result in this turn of the loop.
        turn: when an await last yielded a turn, or polled, by `Runtime.ticks`; an array, which native code writes, too.
        spin_seconds, crowded: as given; no polling where time is virtual.
    """

    def __init__(self, context: Context, groups: Mapping[int, Communicator], spin: float, crowded: bool) -> None:
        self.links: tuple[Link, ...] = ()
        self.lookers: dict[Looker, None] = {}
        self.outboxes: tuple[PeerOutbox, ...] = ()
        self.readers: dict[Looker, None] = {}
        self.stray_posts = StrayPosts(context.runtime, groups)
        # Readers that have not looked since something was posted, the next one last; and whether more was posted since.
        self._scan: list[Looker] = []
        self._news = False
        self._runtime = context.runtime
        self._quiet = context.quiet
        self._groups = groups
        self.spin_seconds = self._spin = spin if context.runtime.may_spin else 0.0
        self._sched_yield = getattr(os, "sched_yield", None)
        self.crowded = crowded
        # Whether a peer was on the core of this rank at the last look.
        self._beside = False
        self.spun = False
        # Whether polling ended for lack of time while peers were sending.
        self._busy = False
        self.turn = array("d", [0.0])

    @property
    def polls(self) -> bool:
        """Whether awaits poll at all."""
        return self._spin > 0.0

    def spin(self, completion: Completion) -> None:
        """Poll the links for a moment; without result at most once per turn of the loop."""
        if not self.spun and self._spin and (self.links or self.lookers):
            self._quiet.run(self._poll, completion, 0)

    def poll_once(self) -> None:
        """Take what has come, without waiting for more."""
        if self.links:
            self._quiet.run(self._poll_once)

    def _poll_once(self) -> None:
        for link in self.links:
            link.poll()
        self.look()

    def _poll(self, completion: Completion | None, before: int) -> None:
        """Poll until `completion` is done, or without one until fewer than `before` operations are in flight.

        Time that other processes use on the core that this rank yields does not count as polling; but no
        callback takes longer than `BUDGET`.
        """
        ticks, spin = self._runtime.ticks, self._spin
        give_way = self._sched_yield if self.crowded or self._beside else None
        now = ticks()
        idle, limit, doubt = now + spin, now + BUDGET, now + DOUBT
        while now < idle and now < limit:
            if give_way is not None:
                # Before it looks: who comes here has looked just now, and waits for a rank that may need this core.
                give_way()
                given, now = now, ticks()
                idle += now - given
            moved = False
            for link in self.links:
                if link.poll():
                    moved = True
            if self.look():
                moved = True
            if moved:
                idle = now + spin
            if (moved and self._in_flight() < before) if completion is None else completion.done:
                return
            now = ticks()
            if now > doubt:
                doubt = limit
                self._beside = self._is_beside_a_peer()
                give_way = self._sched_yield if self.crowded or self._beside else None
        self._busy = now < idle
        if completion is not None:
            self.turn[0] = now
        if completion is not None or not self._busy:
            self.rest()

    def _is_beside_a_peer(self) -> bool:
        return any(link.shared.is_beside() for link in self.links if link.shared is not None)

    def linger(self, moved: bool) -> bool:
        """Poll on at the end of a turn in which something `moved`, while data arrives and no operation has ended.

        Returns:
            Whether the next turn polls again, before this rank has to be woken.
        """
        if not moved and not self._busy:
            return False
        self._busy = False
        if (before := self._in_flight()) and self._spin and not self.spun:
            self._poll(None, before)
        return True

    def look(self) -> bool:
        """Let operations look into shared memory, for about `BUDGET` seconds; whether anything moved, or is left."""
        moved = self._look_on() if self.lookers else False
        # All are asked: otherwise the same posts would be found twice.
        for outbox in self.outboxes:
            if outbox.has_news():
                self._news = True
        if self._news:
            self.stray_posts.watch()
        if not self.readers:
            self._news = False
        elif self._news or self._scan:
            moved = self._read() or moved
        return moved

    def _look_on(self) -> bool:
        ticks = self._runtime.ticks
        deadline = ticks() + BUDGET
        moved = False
        for operation in tuple(self.lookers):
            try:
                if operation.look():
                    moved = True
            except Exception as error:
                operation.comm.crashed(error)
            if ticks() > deadline:
                # The one that has looked is the last next time.
                if operation in self.lookers:
                    del self.lookers[operation]
                    self.lookers[operation] = None
                break
        return moved

    def rescan(self) -> None:
        """Let all readers look, and keep none that has ended: views of slots would keep memory mapped."""
        self._scan, self._news = [], True

    def _read(self) -> bool:
        """Call all readers once after each post, over several calls if need be."""
        if not self._scan:
            self._news = False
            self._scan = list(self.readers)
            self._scan.reverse()
        scan, ticks = self._scan, self._runtime.ticks
        deadline = ticks() + BUDGET
        moved = False
        while scan:
            operation = scan.pop()
            try:
                if operation.look():
                    moved = True
            except Exception as error:
                operation.comm.crashed(error)
            if not len(scan) % SOME and ticks() > deadline:
                break
        return moved or bool(scan) or self._news

    def _in_flight(self) -> int:
        return sum([len(group.in_flight) for group in self._groups.values()])

    def rest(self) -> None:
        """Stop polling without result in this turn."""
        self.spun = True
        self._runtime.call_soon(self._turned)

    def turn_is_due(self) -> bool:
        """Whether an await must yield: the last turn of the loop is too long ago."""
        if self._runtime.due:
            self._runtime.settle()
        now = self._runtime.ticks()
        if now - self.turn[0] < TURN:
            return False
        self.turn[0] = now
        return True

    def _turned(self) -> None:
        self.spun = False
