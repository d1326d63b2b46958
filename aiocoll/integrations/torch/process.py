"""What all groups of a process share: the event loop in its thread, and a pool that completes futures."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from weakref import WeakSet

from aiocoll.group.process_group import ProcessGroup
from aiocoll.loops import LoopThread
from aiocoll.numerals import to_float

__all__ = ["Closable", "process"]

#: Threads that complete futures. More than one: a callback may wait for a work whose future another one completes.
_THREADS = 8
#: Seconds that groups which were not destroyed may take to close when the interpreter ends.
_END = 2.0
#: Seconds after which a thread gives up the GIL for another one; Python's own 5 ms delay each step of a collective.
_SWITCH_INTERVAL = 0.0005
_VARIABLE = "AIOCOLL_SWITCH_INTERVAL"


class Closable(Protocol):
    """A group that the end of the process closes."""

    @property
    def pg(self) -> ProcessGroup:
        """The group of aiocoll."""

    @property
    def thread(self) -> LoopThread:
        """Its event loop."""


class _Process:
    """The shared parts; made by the first group, again in a forked child.

    Attributes:
        groups: of torch, which are open.
        world: the group of all ranks that `aiocoll run` has started, if they met before torch's.
    """

    def __init__(self) -> None:
        self.groups: WeakSet[Closable] = WeakSet()
        self.world: ProcessGroup | None = None
        self._thread: LoopThread | None = None
        self._pool: ThreadPoolExecutor | None = None

    def thread(self) -> LoopThread:
        """Return the thread with the event loop of all groups."""
        if self._thread is None:
            _set_switch_interval()
            self._thread = LoopThread()
            atexit.register(self._end)
        return self._thread

    def pool(self) -> ThreadPoolExecutor:
        """Return the pool that completes futures."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "aiocoll-futures")
        return self._pool

    def forget(self) -> None:
        """Forget the groups and the pool of the process that this one was forked from."""
        self.groups, self.world, self._pool = WeakSet(), None, None

    def _end(self) -> None:
        """Close groups that were not destroyed: the other ranks would take this one for lost."""
        thread = self._thread
        if thread is None or thread.is_closed():
            return
        open_groups = [each.pg for each in self.groups if each.thread is thread]
        if self.world is not None:
            open_groups.append(self.world)

        async def close() -> None:
            await asyncio.gather(*(pg.shutdown() for pg in open_groups), return_exceptions=True)

        with contextlib.suppress(Exception):
            if open_groups:
                thread.start(close).wait(_END)
            thread.close()


def _set_switch_interval() -> None:
    given = os.environ.get(_VARIABLE)
    interval = _SWITCH_INTERVAL if given is None else to_float(float(given), _VARIABLE)
    if 0.0 < interval < sys.getswitchinterval():
        sys.setswitchinterval(interval)


process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.forget)
