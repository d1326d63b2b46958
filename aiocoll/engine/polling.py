"""Busy polling for data: before an await suspends, and before an idle event loop sleeps.

Polling finds new data within a fraction of a microsecond. A wake-up through the kernel takes 20 µs. So an await polls
for `spin_us`, and a loop iteration does the same if peers were sending. A rank that receives nothing sleeps.

A polling rank keeps its core, so a peer that the kernel has put on the same core cannot send. The kernel does that when
another process keeps the other cores busy: an exchange of 8 B then takes 120 µs instead of 7 µs. So ranks that share a
core take turns (`sched_yield`). Since both want to run all the time, the kernel moves one to the next free core.
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

#: Seconds since the last loop iteration after which an await yields to the loop even if its result is ready, so that
#: other tasks run.
TURN: Final = 500e-6
#: Seconds of polling after which an await checks whether a peer runs on the same core. Most awaits complete earlier.
DOUBT: Final = 5e-6
#: Number of operations that read shared memory between two clock readings. Each takes half a microsecond, or the time
#: of a small reduction.
READERS_PER_CLOCK: Final = 8


class Polling:
    """The busy polling of one endpoint.

    Args:
        context: the endpoint's context.
        groups: the endpoint's groups, by id.
        spin: seconds to poll without result; 0 if a peer shares this process.
        crowded: whether this host has more ranks than cores: then ranks yield the core between polls.

    Attributes:
        links: the links to poll.
        lookers: operations that look into shared memory in every poll.
        outboxes: the outboxes of the peers on this host.
        readers: operations that look into shared memory after a new post to a slot.
        stray_posts: finds posts that match no operation of this rank.
        spun: whether an await has polled without result in this loop iteration.
        turn: the time, by `Runtime.ticks`, at which an await last yielded to the loop or polled. It is an array, which
            native code also writes.
        spin_seconds, crowded: as given; `spin_seconds` is 0 if time is virtual.
    """

    def __init__(self, context: Context, groups: Mapping[int, Communicator], spin: float, crowded: bool) -> None:
        self.links: tuple[Link, ...] = ()
        self.lookers: dict[Looker, None] = {}
        self.outboxes: tuple[PeerOutbox, ...] = ()
        self.readers: dict[Looker, None] = {}
        self.stray_posts = StrayPosts(context.runtime, groups)
        # The operations that have not read shared memory since the last post, the next one last. `_has_news`: whether
        # newer posts have arrived.
        self._scan: list[Looker] = []
        self._has_news = False
        self._runtime = context.runtime
        self._quiet = context.quiet
        self._groups = groups
        self.spin_seconds = self._spin = spin if context.runtime.may_spin else 0.0
        self._sched_yield = getattr(os, "sched_yield", None)
        self.crowded = crowded
        # Whether a peer ran on this rank's core at the last check.
        self._shares_core = False
        self.spun = False
        # Whether polling stopped for lack of time while data was still arriving.
        self._busy = False
        self.turn = array("d", [0.0])

    @property
    def polls(self) -> bool:
        """Return whether awaits poll before they suspend."""
        return self._spin > 0.0

    def spin(self, completion: Completion) -> None:
        """Poll the links for at most `spin` seconds. Without result, poll only once per loop iteration."""
        if not self.spun and self._spin and (self.links or self.lookers):
            self._quiet.run(self._poll, completion, 0)

    def poll_once(self) -> None:
        """Handle the data that has arrived, without waiting for more."""
        if self.links:
            self._quiet.run(self._poll_once)

    def _poll_once(self) -> None:
        for link in self.links:
            link.poll()
        self.look()

    def _poll(self, completion: Completion | None, before: int) -> None:
        """Poll until `completion` is done or, if it is None, until fewer than `before` operations are in flight.

        Time that other processes use on the yielded core does not count as polling. But no callback takes longer than
        `BUDGET`.
        """
        ticks, spin = self._runtime.ticks, self._spin
        yield_gil = self._sched_yield if self.crowded or self._shares_core else None
        now = ticks()
        idle, limit, doubt = now + spin, now + BUDGET, now + DOUBT
        while now < idle and now < limit:
            if yield_gil is not None:
                # Yield the core before the first poll: the caller has just polled, and the awaited rank may need this
                # core.
                yield_gil()
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
                self._shares_core = self._is_core_shared()
                yield_gil = self._sched_yield if self.crowded or self._shares_core else None
        self._busy = now < idle
        if completion is not None:
            self.turn[0] = now
        if completion is not None or not self._busy:
            self.stop_until_next_iteration()

    def _is_core_shared(self) -> bool:
        return any(link.shared.shares_core() for link in self.links if link.shared is not None)

    def keep_polling(self, moved: bool) -> bool:
        """Continue to poll at the end of a loop iteration, as long as data arrives and no operation has ended.

        Args:
            moved: whether this iteration received or sent data.

        Returns:
            Whether the next iteration polls again before this rank must be woken.
        """
        if not moved and not self._busy:
            return False
        self._busy = False
        if (before := self._in_flight()) and self._spin and not self.spun:
            self._poll(None, before)
        return True

    def look(self) -> bool:
        """Let operations read shared memory for about `BUDGET` seconds; return whether progress was made, or may be."""
        moved = self._run_lookers() if self.lookers else False
        # Check every outbox: an outbox that is skipped would report the same posts again.
        for outbox in self.outboxes:
            if outbox.has_news():
                self._has_news = True
        if self._has_news:
            self.stray_posts.watch()
        if not self.readers:
            self._has_news = False
        elif self._has_news or self._scan:
            moved = self._run_readers() or moved
        return moved

    def _run_lookers(self) -> bool:
        ticks = self._runtime.ticks
        deadline = ticks() + BUDGET
        moved = False
        for operation in tuple(self.lookers):
            try:
                if operation.look():
                    moved = True
            except Exception as error:
                operation.comm.revoke_after_crash(error)
            if ticks() > deadline:
                # Move the operation that was just polled to the end, so that the next poll starts with another
                # operation.
                if operation in self.lookers:
                    del self.lookers[operation]
                    self.lookers[operation] = None
                break
        return moved

    def rescan(self) -> None:
        """Let all operations in `readers` look again. Drop references to ended ones, which would keep memory mapped."""
        self._scan, self._has_news = [], True

    def _run_readers(self) -> bool:
        """Call all operations in `readers` once after each post, over several calls of this method if necessary."""
        if not self._scan:
            self._has_news = False
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
                operation.comm.revoke_after_crash(error)
            if not len(scan) % READERS_PER_CLOCK and ticks() > deadline:
                break
        return moved or bool(scan) or self._has_news

    def _in_flight(self) -> int:
        return sum([len(group.in_flight) for group in self._groups.values()])

    def stop_until_next_iteration(self) -> None:
        """Stop polling in this loop iteration, because polling had no result."""
        self.spun = True
        self._runtime.call_soon(self._on_iteration_end)

    def turn_is_due(self) -> bool:
        """Return whether an await must yield to the event loop, because the last loop iteration is too long ago."""
        if self._runtime.due:
            self._runtime.settle()
        now = self._runtime.ticks()
        if now - self.turn[0] < TURN:
            return False
        self.turn[0] = now
        return True

    def _on_iteration_end(self) -> None:
        self.spun = False
