"""When all work of a call is enqueued on its CUDA device: what `Work.on_stream` waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiocoll.elements.device import DeviceArray
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.launcher import Launched
from aiocoll.work import Work

__all__ = ["Enqueued"]


class Enqueued:
    """The state of one call.

    Args:
        work: the call's.
        arrays: the call's; the stream that was current at the call is that of the first.
    """

    __slots__ = ("_arrays", "_launched", "_waiting", "_work")

    def __init__(self, work: Work[Any], arrays: Sequence[DeviceArray | None]) -> None:
        self._work = work
        self._arrays = arrays
        self._launched: Launched | None = None
        self._waiting: list[asyncio.Future[None]] = []
        work._order_by(self.order)

    async def order(self, stream: int | None) -> Any:
        """Make `stream` wait for the end of the call, once that is enqueued."""
        while self._launched is None and not self._work.done():
            enqueued = asyncio.get_running_loop().create_future()
            self._waiting.append(enqueued)
            await enqueued
        if self._launched is None or self._work.done():
            return await self._work
        if stream is None:
            stream = next(each.stream for each in self._arrays if each is not None)
        try:
            await self._launched.on_stream(stream)
        except DeviceError:
            return await self._work
        return self._work._value if (unwrap := self._work._unwrap) is None else unwrap()

    def put(self, launched: Launched) -> None:
        """The last of its work is being enqueued."""
        self._launched = launched
        if self._waiting:
            self._wake()

    def over(self) -> None:
        """The call has ended; it may have failed before a stuck launcher reached it."""
        self._work._order_by(None)
        if self._waiting:
            self._wake()
        if self._launched is not None:
            self._launched.release()

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
