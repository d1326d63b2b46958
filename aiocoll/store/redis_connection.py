"""`RedisConnection`: a connection to a Redis server, which may be closed at any moment and opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from aiocoll.store.redis_address import RedisAddress

__all__ = ["PATIENCE", "RedisConnection", "pauses"]

#: Seconds in which a server that is there connects, or answers: 8 MiB take as long at 5 Mbit/s.
PATIENCE: Final = 15.0
#: Seconds between attempts to connect, at first and at last.
_FIRST_RETRY: Final = 0.005
_LAST_RETRY: Final = 0.25
#: Seconds that closing waits for the end of an attempt to connect.
_CLOSE_TIMEOUT: Final = 1.0


class RedisConnection:
    """One connection. Its calls raise what the package `redis` raises, or `OSError`; `hang_up` comes after each error.

    Args:
        address: of the server.
    """

    def __init__(self, address: RedisAddress) -> None:
        self._connection = address.connection()
        self._connecting: asyncio.Future[None] | None = None
        self._transport: Any = None

    @property
    def connected(self) -> bool:
        """Whether it has been opened, and not been closed since."""
        return bool(self._connection.is_connected)

    @property
    def reached(self) -> str:
        """The numeric address of the server, once connected."""
        return str(self._transport.get_extra_info("peername")[0])

    async def open(self) -> None:
        """Connect, and log in."""
        self._connecting = connecting = asyncio.ensure_future(self._connection.connect())
        connecting.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # who is cancelled does not look
        try:
            await asyncio.wait([connecting])
        finally:
            connecting.cancel()
        connecting.result()
        self._transport = self._connection._writer.transport  # the package has no public way to it

    async def send(self, *words: str | bytes | int) -> None:
        """Send a command."""
        await self._connection.send_command(*words)

    async def receive(self) -> Any:
        """Return the next answer, or message."""
        return await self._connection.read_response()

    async def hang_up(self) -> None:
        """Close it at once, whatever state it is in."""
        if self._transport is not None:
            self._transport.abort()  # TLS would wait for the server
        with suppress(Exception):
            await self._connection.disconnect(nowait=True)

    async def aclose(self, user: asyncio.Task[None] | None) -> None:
        """Close it for good, and end the task that uses it.

        A TLS connection of asyncio that is cancelled in the moment in which it is made stays open, and nobody has it:
        so an attempt may end first.
        """
        if self._connecting is not None:
            await asyncio.wait([self._connecting], timeout=_CLOSE_TIMEOUT)
        if user is not None:
            user.cancel()
            await asyncio.wait([user])
        await self.hang_up()


def pauses() -> Iterator[float]:
    """Yield the seconds between attempts to reach a server."""
    pause = _FIRST_RETRY
    while True:
        yield pause
        pause = min(2 * pause, _LAST_RETRY)
