"""Closing of objects at the end of an event loop, while the loop can still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["Closable", "LoopEnd"]

#: Number of iterations for which an ending loop closes objects, because garbage collection may reveal further objects.
TURNS = 3


class Closable(Protocol):
    """An object that is closed by its owner, or else at the end of the loop."""

    @property
    def is_ending(self) -> bool:
        """True if the owner is closing the object, or has closed it."""

    def begin_abandon(self) -> asyncio.Task[None]:
        """Start to close the object without waiting for works; return the closing task, possibly the owner's."""

    def warn(self) -> None:
        """Warn that the owner has not closed the object."""


class LoopEnd:
    """A list of objects to close at the end of the running loop.

    `asyncio.run`, like all users of `asyncio.Runner`, closes the loop's asynchronous generators last, when every task
    has ended and the loop still runs. Loops have no other hook for this.

    A loop does not keep its generators alive, so keep a reference to this object.
    """

    def __init__(self) -> None:
        self._open: WeakSet[Closable] = WeakSet()
        self._forgotten = False
        self._generator = self._wait()
        _step(anext(self._generator).__await__())

    def add(self, closable: Closable) -> None:
        """Add an object to close at the end of the loop, without keeping it alive."""
        self._open.add(closable)

    def forget(self) -> None:
        """Cancel the closing: close nothing at the end of the loop."""
        self._forgotten = True
        if not self._generator.ag_running:  # type: ignore[attr-defined]
            _step(self._generator.aclose().__await__())

    async def _wait(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if not self._forgotten:
                await self._close()

    async def _close(self) -> None:
        left = [each for each in self._open if not each.is_ending]
        for _ in range(TURNS):
            ending = {each.begin_abandon() for each in list(self._open)}
            if pending := {task for task in ending if not task.done()}:
                await asyncio.wait(pending)
            else:
                await asyncio.sleep(0)
        for each in left:
            each.warn()


def _step(steps: Generator[Any, None, None]) -> None:
    """Run a generator-based coroutine to its end; it must not suspend."""
    with suppress(StopIteration):
        steps.send(None)
