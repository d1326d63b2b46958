"""`RedisChanges`: which entries on a Redis server may have changed, over one connection for all waits of a process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Self

from aiocoll.errors import StoreError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.redis_address import RedisAddress
from aiocoll.store.redis_connection import PATIENCE, RedisConnection, pauses

__all__ = ["RedisChanges", "Watch"]


class RedisChanges:
    """Listens while there are waits, and until the next change after the last of them.

    Messages that come while there is no connection are lost, and nothing tells that a server has lost its data: who
    waits looks again from time to time all the same.

    Args:
        address: of the server.
        channel: where the names of changed entries are published.
    """

    def __init__(self, address: RedisAddress, channel: str) -> None:
        self.refusal: StoreError | None = None
        """Why the server does not tell, if it refuses to."""
        self.listening = False
        """Whether no change is missed."""
        self._address = address
        self._channel = channel
        self._connection = RedisConnection(address)
        self._watches: dict[bytes, set[Watch]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def watch(self) -> Watch:
        """Return what tells a wait when to look again; for ``with``."""
        return Watch(self)

    def add(self, name: bytes, watch: Watch) -> None:
        """Tell `watch` of changes of an entry from now on."""
        self._watches.setdefault(name, set()).add(watch)
        if self._closed:
            watch.look.set()
        elif self._task is None or self._task.done():
            self.refusal = None
            runtime = Runtime.of(running_loop())
            self._task = runtime.create_task(self._listen(runtime), f"aiocoll changes on {self._address}")

    def remove(self, name: bytes, watch: Watch) -> None:
        """Do not any more."""
        self._watches[name].remove(watch)
        if not self._watches[name]:
            del self._watches[name]

    async def aclose(self) -> None:
        """Disconnect; all waits look again."""
        self._closed = True
        await self._connection.aclose(self._task)
        self._all_may_have_changed()

    async def _listen(self, runtime: Runtime) -> None:
        pause = pauses()
        while self._watches and self.refusal is None:
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._connection.open()
                    await self._connection.send("SUBSCRIBE", self._channel)
                    await self._connection.receive()
                self.listening = True
                self._all_may_have_changed()
                pause = pauses()
                while self._watches:
                    _, _, name = await self._connection.receive()
                    for watch in self._watches.get(name, ()):
                        watch.look.set()
            except Exception as error:
                self.refusal = self._address.refusal(error)
                if self.refusal is None:
                    await runtime.sleep(next(pause))
            finally:
                self.listening = False
                await self._connection.hang_up()
        self._all_may_have_changed()

    def _all_may_have_changed(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.look.set()


class Watch:
    """When a wait is to look again; it waits for one entry at a time.

    Attributes:
        look: set when the entry may have changed.
    """

    def __init__(self, changes: RedisChanges) -> None:
        self.look = asyncio.Event()
        self._changes = changes
        self._name: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._name is not None:
            self._changes.remove(self._name, self)

    async def change(self, name: bytes, timeout: float) -> None:
        """Wait until an entry may have changed since the wait has begun to look at it, for `timeout` seconds at most.

        Raises:
            StoreError: the server refuses to tell.
        """
        if name != self._name:
            self.__exit__()
            self._name = name
            self._changes.add(name, self)
            if self._changes.listening:
                return  # it may have changed since the caller has looked
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.look.wait()
        self.look.clear()
        if self._changes.refusal is not None:
            raise self._changes.refusal
