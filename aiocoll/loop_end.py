"""End of an event loop: closing of objects while the loop can still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["Closable", "LoopEnd"]

#: Number of iterations of an ending loop in which objects that are garbage-collected meanwhile are closed.
TURNS = 3


class Closable(Protocol):
    """An object that its owner closes, or the end of the loop."""

    @property
    def is_ending(self) -> bool:
        """True if its owner is closing it, or has closed it."""

    def begin_abandon(self) -> asyncio.Task[None]:
        """Start closing without waiting for works, and return the closing task, which may be the owner's."""

    def warn(self) -> None:
        """Warn that the owner has not closed the object."""


class LoopEnd:
    """Closes objects at the end of the running loop.

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
        """Also close `closable` at the end of the loop. It is not kept alive."""
        self._open.add(closable)

    def forget(self) -> None:
        """Cancel the closing at the end of the loop."""
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
    """Run a generator that does not suspend."""
    with suppress(StopIteration):
        steps.send(None)
