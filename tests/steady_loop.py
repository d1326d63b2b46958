"""An event loop for tests with time limits, whose clock stops while other processes use the CPU."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that sums up the seconds of its waits, each counted up to the requested timeout."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        began = time.monotonic()
        events = super().select(timeout)
        took = time.monotonic() - began
        self.waited += took if timeout is None else min(took, max(timeout, 0.0))
        return events


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock shows its CPU time plus the time that it waited for events."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.waited + time.thread_time()


def run_steadily(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a `SteadyLoop`, as `asyncio.run` does on the default loop."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(coro)
