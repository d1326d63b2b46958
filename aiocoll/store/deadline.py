"""`DeadlineStore`: a view of a store whose requests share one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiocoll.errors import StoreError, StoreTimeoutError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.base import GRACE, Store, await_reply
from aiocoll.store.view import StoreView

__all__ = ["DeadlineStore", "last_request"]

T = TypeVar("T")

#: Timeout in seconds of the last request of a failing function, which should soon raise its error.
_LAST_REQUEST = 0.3


class DeadlineStore(StoreView):
    """A view of `store` for a function that makes many requests and has one timeout for all of them.

    Waits end at the deadline. Other requests are possible until `GRACE` seconds after it, and are then cancelled.

    Args:
        store: the store that carries out the requests.
        timeout: seconds until the deadline.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        super().__init__(store)
        self._seconds = timeout
        self._failure = ""
        self._runtime = Runtime.of(running_loop())
        self._deadline = self._runtime.time() + timeout

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._await_in_time(command, super()._call(command, arguments))

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        limit = min(timeout, max(0.0, self._time_left()))
        return await self._await_in_time(command, super()._wait(command, arguments, limit))

    def _time_left(self) -> float:
        return self._deadline - self._runtime.time()

    async def _await_in_time(self, command: str, request: Coroutine[Any, Any, Any]) -> Any:
        left = self._time_left()
        if left <= -GRACE:
            request.close()
            late = f"{command} was not sent to {self}: the timeout of the call, {self._seconds:g} s, has expired"
            raise StoreTimeoutError(self._failure or late)
        try:
            return await await_reply(request, left, self._store, command)
        except StoreTimeoutError as error:
            self._failure = str(error)
            raise


async def last_request(request: Coroutine[Any, Any, T]) -> T | None:
    """Await the last request of a failing function; return None if the store fails or does not answer soon."""
    try:
        async with asyncio.timeout(_LAST_REQUEST):
            return await request
    except (StoreError, TimeoutError):
        return None
