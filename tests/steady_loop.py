"""An event loop whose clock stops while other processes use the processor, for tests with time limits."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that adds up the seconds of its waits, without the time by which a wait was too long."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        began = time.monotonic()
        events = super().select(timeout)
        took = time.monotonic() - began
        self.waited += took if timeout is None else min(took, max(timeout, 0.0))
        return events


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the sum of its waits and its CPU time."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.waited + time.thread_time()


def run_steadily(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a `SteadyLoop`, as `asyncio.run`."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(coro)
