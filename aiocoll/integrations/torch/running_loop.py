"""`RunningLoop`: the program's own running event loop, with the interface of `LoopThread`."""

from __future__ import annotations

import asyncio
import threading

from aiocoll.loops import LoopThread

__all__ = ["RunningLoop"]


class RunningLoop(LoopThread):
    """The program's running event loop, with the interface of `LoopThread`, for calls from other threads.

    The program owns the loop, so `close` does nothing. A wait on the thread of the loop raises `RuntimeError`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running = asyncio.get_running_loop()
        self._owner = threading.get_ident()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop."""
        return self._running

    def is_current(self) -> bool:
        """Return whether the calling thread is the event loop's thread."""
        return threading.get_ident() == self._owner

    def is_closed(self) -> bool:
        """Return whether the loop was closed."""
        return self._running.is_closed()

    def close(self) -> None:
        """Do nothing: the program owns the loop."""
