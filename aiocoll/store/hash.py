"""`HashStore`: a store in memory, inside one event loop."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from aiocoll.errors import StoreUnavailableError
from aiocoll.runtime import running_loop
from aiocoll.store.base import Store, timeout_error, wait_until_done
from aiocoll.store.core import PendingWait, StoreCore

__all__ = ["HashStore"]


class HashStore(Store):
    """A store in this process's memory, for ranks that are tasks of one event loop."""

    _may_stop = False

    def __init__(self, timeout: float | timedelta = 300.0) -> None:
        super().__init__(timeout)
        self._core = StoreCore()
        self._waits: dict[asyncio.Future[Any], PendingWait] = {}
        self._closed = False

    async def aclose(self) -> None:
        """Close the store for all its users."""
        self._closed = True
        for future, waiter in self._waits.items():
            if not future.done():
                self._core.drop(waiter)
                future.set_exception(self._closed_error())

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        if self._closed:
            raise self._closed_error()
        return self._core.apply(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        if self._closed:
            raise self._closed_error()
        future: asyncio.Future[Any] = running_loop().create_future()
        waiter = self._core.start(command, arguments, future.set_result)
        if waiter is None:
            return future.result()
        self._waits[future] = waiter
        try:
            if not await wait_until_done(future, timeout):
                raise timeout_error("HashStore", command, self._core.missing(command, arguments), timeout)
            return future.result()
        except asyncio.CancelledError:
            if future.done() and future.exception() is None and command == "queue_pop":
                self._core.apply("queue_return", (arguments[0], future.result()))
            raise
        finally:
            del self._waits[future]
            if not future.done():
                self._core.drop(waiter)

    def _closed_error(self) -> StoreUnavailableError:
        return StoreUnavailableError("this HashStore is closed: make a new one")
