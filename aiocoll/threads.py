"""Blocking waits of a thread for an operation that the event loop of another thread completes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import Any, Protocol

from aiocoll.runtime import Runtime

__all__ = ["CHECK_INTERVAL", "Waitable", "wait_in_thread"]

#: Seconds between two checks of a waiting thread: whether a signal has arrived, and whether the loop still runs. The
#: end of a loop does not notify the thread.
CHECK_INTERVAL = 0.1


class Waitable(Protocol):
    """The methods of an operation for which a thread waits. All methods except `done` are called in the loop."""

    def done(self) -> bool:
        """Return whether the operation has ended. If so, its outcome is already set."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` in the loop after the operation has ended."""

    def remove_done_callback(self, fn: Callable[[Any], object]) -> int:
        """Remove the callback `fn`."""


def wait_in_thread(
    work: Waitable, loop: asyncio.AbstractEventLoop, runtime: Runtime, timeout: float | timedelta | None
) -> None:
    """Block this thread until `work` has ended. For errors, see `aiocoll.work.Work.wait`."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    end = inf if seconds is None else runtime.ticks() + seconds
    ended = threading.Event()

    def notify(_: object) -> None:
        ended.set()

    _call(loop, work.add_done_callback, notify)
    try:
        while not work.done():
            _check(work, loop, runtime)
            left = end - runtime.ticks()
            waited = ended.wait(max(0.0, min(left, CHECK_INTERVAL)))
            if not waited and left <= CHECK_INTERVAL and not work.done():
                raise TimeoutError(f"{work!r} has not ended within {seconds} s")
    except BaseException:
        _call(loop, work.remove_done_callback, notify)
        raise


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # raised if the loop is closed
        loop.call_soon_threadsafe(call, *args)


def _check(work: Waitable, loop: asyncio.AbstractEventLoop, runtime: Runtime) -> None:
    """Raise RuntimeError if `work` can no longer end, as after a fork or after the end of its loop."""
    if runtime.thread == 0:
        raise RuntimeError(f"{work!r} belongs to the parent process: it cannot end in this forked child")
    # A loop sets the outcome before it stops, so check the outcome after the loop.
    if not loop.is_running() and (loop.is_closed() or runtime.thread == threading.get_ident()) and not work.done():
        why = "was closed" if loop.is_closed() else "belongs to this thread and does not run"
        raise RuntimeError(f"{work!r} has not ended, and its event loop {why}: it cannot complete")
