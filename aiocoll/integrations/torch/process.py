"""Resources that all torch groups of a process share: the event loop thread, and a pool for callbacks."""

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

__all__ = ["Closable", "process", "set_switch_interval"]

#: Number of threads that complete futures: several, so that a callback may wait for a work that another thread
#: completes.
_THREADS = 8
#: Maximum seconds at interpreter exit to close the groups that the program has not destroyed.
_END = 2.0
#: GIL switch interval in seconds, because Python's default of 5 ms delays each step of a collective.
_SWITCH_INTERVAL = 0.0005
_VARIABLE = "AIOCOLL_SWITCH_INTERVAL"


class Closable(Protocol):
    """A torch group that is closed when the interpreter exits."""

    @property
    def pg(self) -> ProcessGroup:
        """The aiocoll group that the torch group wraps."""

    @property
    def thread(self) -> LoopThread:
        """The thread whose event loop carries out the group's calls."""


class _Process:
    """The shared resources of this process, created by the first torch group; a forked child creates its own.

    Attributes:
        groups: the open torch groups.
        world: the group of all ranks under `aiocoll run`, on which they exchange the address of torch's store.
    """

    def __init__(self) -> None:
        self.groups: WeakSet[Closable] = WeakSet()
        self.world: ProcessGroup | None = None
        self._thread: LoopThread | None = None
        self._pool: ThreadPoolExecutor | None = None

    def thread(self) -> LoopThread:
        """Return the thread whose event loop carries out the torch groups."""
        if self._thread is None:
            set_switch_interval()
            self._thread = LoopThread()
            atexit.register(self._end)
        return self._thread

    def pool(self) -> ThreadPoolExecutor:
        """Return the thread pool that completes the futures of works."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "aiocoll-futures")
        return self._pool

    def forget(self) -> None:
        """Drop the groups and thread pool of the parent process; runs in a forked child."""
        self.groups, self.world, self._pool = WeakSet(), None, None

    def _end(self) -> None:
        """Close all groups at exit, so that other ranks do not count this rank as lost."""
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


def set_switch_interval() -> None:
    """Shorten the interpreter's GIL switch interval to 0.5 ms, or to ``AIOCOLL_SWITCH_INTERVAL``.

    Raises:
        ValueError: ``AIOCOLL_SWITCH_INTERVAL`` is not a number of seconds.
    """
    given = os.environ.get(_VARIABLE)
    try:
        interval = _SWITCH_INTERVAL if given is None else to_float(float(given), _VARIABLE)
    except ValueError:
        raise ValueError(f"{_VARIABLE}={given!r} must be a number of seconds, or 0 to keep Python's interval") from None
    if 0.0 < interval < sys.getswitchinterval():
        sys.setswitchinterval(interval)


process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.forget)
