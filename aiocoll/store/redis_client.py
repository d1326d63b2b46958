"""`RedisClient`: the requests of one process to a Redis server, over one connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from aiocoll.errors import StoreError, StoreUnavailableError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.base import settled
from aiocoll.store.redis_address import RedisAddress
from aiocoll.store.redis_connection import PATIENCE, RedisConnection, pauses
from aiocoll.store.redis_script import CHANGES, LOST, SCRIPT

__all__ = ["RedisClient"]

#: Seconds after which entries that no client has renewed are removed by the server: for who looks into a failed job.
_LIFETIME: Final = 86400.0
#: Seconds without a request after which a client renews them: an outage may last for hours.
_RENEW_EVERY: Final = 3600.0


@dataclass(slots=True, eq=False)
class _Request:
    """One request. `answer` gets an error as its result, since an exception might not be retrieved."""

    command: str
    arguments: tuple[str | bytes | int, ...]
    number: int
    answer: asyncio.Future[Any] = field(default_factory=lambda: running_loop().create_future())


class RedisClient:
    """Sends requests, one after the other, and each until it has been answered: connections may come and go.

    A task of its own does it, so that a caller that is cancelled takes no connection away from the others.

    Args:
        address: of the server.
        name: of the hash that holds the entries.

    Attributes:
        trouble: why the server could not be reached the last time, None once it has been.
        reached: the numeric address of the server, "" before the first connection.
    """

    def __init__(self, address: RedisAddress, name: str) -> None:
        self.trouble: str | None = None
        self.reached = ""
        self._address = address
        self._name = name
        self._connection = RedisConnection(address)
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unanswered: set[_Request] = set()
        self._task: asyncio.Task[None] | None = None
        self._job = b""
        self._client = ""
        self._count = 0
        self._known = 0
        self._closed = False

    async def call(self, command: str, *arguments: str | bytes | int, timeout: float) -> Any:
        """Return what the server answers to a request of `SCRIPT`.

        Raises:
            StoreUnavailableError: no server has answered within `timeout` seconds, the entries are gone, or the client
                is closed.
            StoreError: the server refuses the request.
        """
        self._check_open()
        self._count += command in CHANGES
        request = _Request(command, arguments, self._count)
        if self._task is None:
            self._task = Runtime.of(running_loop()).create_task(self._serve(), f"aiocoll requests to {self._address}")
        self._unanswered.add(request)
        self._requests.put_nowait(request)
        try:
            if not await settled(request.answer, timeout):
                raise StoreUnavailableError(
                    f"{self.trouble or f'no store at {self._address}: no answer'}; tried for {timeout:.3g} s"
                )
        finally:
            self._unanswered.discard(request)
            request.answer.cancel()
        answer = request.answer.result()
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def aclose(self) -> None:
        """Disconnect; pending and later calls raise `StoreUnavailableError`."""
        self._closed = True
        for request in self._unanswered:
            if not request.answer.done():
                request.answer.set_result(self._closed_error())
        await self._connection.aclose(self._task)

    async def _serve(self) -> None:
        runtime = Runtime.of(running_loop())
        self._client = runtime.random_bytes(16).hex()
        while True:
            request = await self._next()
            pause = pauses()
            while not request.answer.done():
                try:
                    answer = await self._carry_out(request, runtime)
                except Exception as error:
                    await self._connection.hang_up()
                    answer = self._address.refusal(error)
                    if answer is None:
                        self.trouble = f"no store at {self._address}: {self._address.explain(error)}"
                        await runtime.sleep(next(pause))
                        continue
                if not request.answer.done():
                    request.answer.set_result(answer)

    async def _next(self) -> _Request:
        try:
            async with asyncio.timeout(_RENEW_EVERY):
                return await self._requests.get()
        except TimeoutError:
            return _Request("renew", (), self._count)

    async def _carry_out(self, request: _Request, runtime: Runtime) -> Any:
        async with asyncio.timeout(PATIENCE):
            if not self._connection.connected:
                await self._connection.open()
                self.reached = self._connection.reached
            if not self._job:
                self._job = await self._ask(runtime.random_bytes(16).hex().encode(), 0, "open")
            answer = await self._ask(self._job, request.number, request.command, *request.arguments)
        self.trouble = None
        if answer == LOST:
            return StoreUnavailableError(
                f"{self._address} has lost the entries of this job: it was restarted without them or with an older "
                f"copy, or its key {self._name!r} was removed (FLUSHALL, DEL, an eviction): start all ranks again, and "
                "let the server keep what it has"
            )
        if request.command in CHANGES:
            self._known = request.number
        return answer[0]

    async def _ask(self, job: bytes, number: int, command: str, *arguments: str | bytes | int) -> Any:
        lifetime = int(_LIFETIME * 1e3)
        await self._connection.send(
            "EVAL", SCRIPT, 1, self._name, job, self._client, number, self._known, lifetime, command, *arguments
        )
        return await self._connection.receive()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the RedisStore on {self._address} is closed: make a new one")
