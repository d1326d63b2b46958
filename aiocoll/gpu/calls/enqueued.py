"""`Enqueued`: lets `Work.on_stream` wait until all device work of a call is on its CUDA stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiocoll.completion import Completion
from aiocoll.elements.device import DeviceArray
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.launcher import Launched
from aiocoll.gpu.streams import stream_address

__all__ = ["Enqueued"]


class Enqueued:
    """A record of whether all device work of one call is enqueued on its CUDA stream.

    Args:
        completion: completion of the call.
        arrays: arrays of the call. The stream of the first was current when the call was made.
    """

    __slots__ = ("_arrays", "_completion", "_launched", "_waiting")

    def __init__(self, completion: Completion, arrays: Sequence[DeviceArray | None]) -> None:
        self._completion = completion
        self._arrays = arrays
        self._launched: Launched | None = None
        self._waiting: list[asyncio.Future[None]] = []
        completion.order = self.order

    async def order(self, stream: Any) -> bool:
        """Wait until the call is enqueued, then make `stream` wait for it; return False if it has ended or failed.

        Args:
            stream: stream of any library, or its address; None is the stream that was current at the call.

        Raises:
            TypeError: `stream` is not a stream.
        """
        address = None if stream is None else stream_address(stream)
        while self._launched is None and not self._completion.done:
            enqueued = asyncio.get_running_loop().create_future()
            self._waiting.append(enqueued)
            await enqueued
        if self._launched is None or self._completion.done:
            return False
        if address is None:
            address = next(each.stream for each in self._arrays if each is not None)
        try:
            await self._launched.on_stream(address)
        except DeviceError:
            return False
        return True

    def put(self, launched: Launched) -> None:
        """Record that the last work of the call has been launched."""
        self._launched = launched
        if self._waiting:
            self._wake()

    def over(self) -> None:
        """Resume the tasks that wait in `order`, because the call has ended, launched or not."""
        self._completion.order = None
        if self._waiting:
            self._wake()
        if self._launched is not None:
            self._launched.release()

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
