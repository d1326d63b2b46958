"""`KeyValueStore`: base class of stores on any key-value server, with three methods to implement."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import msgpack

from aiocoll.errors import StoreError, StoreTimeoutError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.base import Store, timeout_error
from aiocoll.store.commands import MAX_VALUE_BYTES, keys_of
from aiocoll.store.polling import Poll
from aiocoll.store.values import UPDATES, Update

__all__ = ["QUEUE", "KeyValueStore", "refuse_reserved"]

#: Prefix of the entries in which queues are stored. Keys must not begin with it.
QUEUE: Final = "aiocoll:queue:"
#: Maximum seconds that a cancelled `queue_pop` waits for the reply to its request.
_RETURN_TIMEOUT: Final = 0.2


class KeyValueStore(Store):
    """A base class for custom stores. Implement `read`, `compare_and_swap`, `names` and `aclose`.

    The first three methods work on entries: a name (str, at most 1,038 bytes in UTF-8) and a value (bytes, at most
    8 MiB). A key is an entry of the same name. A queue is one entry, which exists while the queue has items. Its name
    begins with ``aiocoll:queue:``; keys with this prefix raise `ValueError`. The base class checks all arguments.

    The three methods should wait at most `timeout` seconds for the server, then raise `StoreUnavailableError`. They
    raise the same error after the store was closed, and `StoreError` if the server refuses an entry.

    All other methods are built on these. They are atomic for one key or queue, among any number of clients, with these
    limits:

    - A change is one `read` and one `compare_and_swap`, retried at once while other clients change the same entry. One
      client succeeds at every attempt, but fairness is not guaranteed.
    - Waiting calls poll every 20 ms (at first every 1 ms), one missing key at a time. They miss a key that exists only
      between two polls. Clients that wait for items of a queue are served in no particular order.
    - `multi_set` stores one key after the other. Other clients may see the first keys, and an error leaves them stored.
    - `multi_get` reads until two consecutive readings are equal, at least twice per key. `check` reads each key once.
    - A queue holds 8 MiB in all, and each push and pop transfers all of it. A cancelled `queue_pop` waits up to 0.2 s
      for its reply, and puts a popped item back to the front. Another client may have popped the next item meanwhile.
      If the client dies at that moment, the item is lost.
    - The server determines the maximum number of entries and the order of `list_keys`.

    Override methods for which the server has a better way, such as a `multi_get` in one request or a `get` with
    notification. An override receives the caller's arguments without checks. Override the three queue methods together
    or not at all.
    """

    def __init__(self, timeout: float | timedelta = 300.0) -> None:
        super().__init__(timeout)
        self._returning: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def read(self, name: str) -> bytes | None:
        """Return the value of an entry; None if the entry does not exist.

        The result must include all changes made before the call, by any client.

        Args:
            name: name of the entry.
        """

    @abstractmethod
    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Store `new` under `name` if the value is `old`, in one atomic step.

        Args:
            name: name of the entry.
            old: the value that the entry must have; None means that it must not exist.
            new: the value to store; None removes the entry.

        Returns:
            Whether the value was `old`. Otherwise nothing was changed, and the caller reads again and retries.
        """

    @abstractmethod
    async def names(self) -> list[str]:
        """Return the names of all entries, in any order."""

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        refuse_reserved(arguments)
        if command in UPDATES:
            return await self._update(arguments[0], UPDATES[command], *arguments)
        if command == "queue_push":
            return await self._update_queue(_queue_push, *arguments)
        if command == "check":
            for key in arguments[0]:
                if await self.read(key) is None:
                    return False
            return True
        if command == "queue_len":
            return len(_unpack(await self.read(QUEUE + arguments[0])))
        if command == "multi_set":
            for key, value in zip(*arguments, strict=True):
                await self.set(key, value)
            return None
        keys = [name for name in await self.names() if name.startswith(arguments[0]) and not name.startswith(QUEUE)]
        return keys if command == "list_keys" else len(keys)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        refuse_reserved(arguments)
        poll = Poll(Runtime.of(running_loop()), timeout)
        keys = keys_of(arguments)
        if command == "queue_pop":
            while (item := await self._pop_item(keys[0])) is None:
                if not await poll.pause():
                    raise timeout_error(type(self).__name__, command, keys, timeout)
            return item
        values = await self._read_all(keys, poll, timeout)
        if command == "get":
            return values[0]
        if command == "wait":
            return None
        while values != (again := await self._read_all(keys, poll, timeout)):
            values = again
            if not await poll.pause():
                raise StoreTimeoutError(
                    f"values of {len(keys)} keys kept changing for {timeout:g} s: read fewer keys at once"
                )
        return values

    async def _update_queue(self, update: Callable[..., Update], key: str, *arguments: Any) -> Any:
        return await self._update(QUEUE + key, update, key, *arguments)

    async def _update(self, name: str, update: Callable[..., Update], key: str, *arguments: Any) -> Any:
        while True:
            old = await self.read(name)
            changes, new, result = update(key, old, *arguments)
            if not changes or await self.compare_and_swap(name, old, new):
                return result

    async def _read_all(self, keys: list[str], poll: Poll, timeout: float) -> list[bytes]:
        """Wait until all keys exist at the same time, and return their values."""
        in_time = True
        while True:
            found = {key: await self.read(key) for key in keys}
            values = [value for key in keys if (value := found[key]) is not None]
            if len(values) == len(keys):
                return values
            missing = [key for key in keys if found[key] is None]
            if not in_time:
                raise timeout_error(type(self).__name__, "wait", missing, timeout)
            in_time = await poll.pause()
            while in_time and await self.read(missing[-1]) is None:
                in_time = await poll.pause()

    async def _pop_item(self, key: str) -> bytes | None:
        """Remove and return the first item of a queue; None if it is empty. If cancelled, put the item back."""
        popping = asyncio.ensure_future(self._update_queue(_queue_take, key))
        try:
            await asyncio.wait([popping])
        except asyncio.CancelledError:
            returning = asyncio.ensure_future(self._return_item(key, popping))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)
            await asyncio.wait([returning], timeout=_RETURN_TIMEOUT)
            raise
        item: bytes | None = popping.result()
        return item

    async def _return_item(self, key: str, popping: asyncio.Future[Any]) -> None:
        with suppress(StoreError):  # no item was popped, or the store with its queue is lost
            item = await popping
            if item is not None:
                await self._update_queue(_queue_return, key, item)


def refuse_reserved(arguments: tuple[Any, ...]) -> None:
    """Raise `ValueError` if a key in the arguments of a command has the prefix reserved for queues."""
    for key in keys_of(arguments):
        if key.startswith(QUEUE):
            raise ValueError(f"key {key!r} begins with {QUEUE!r}, the prefix of queues: choose another name")


def _queue_push(key: str, old: bytes | None, item: bytes) -> Update:
    queue = _pack([*_unpack(old), item])
    if len(queue) > MAX_VALUE_BYTES:
        raise StoreError(
            f"queue {key!r} would hold {len(queue)} bytes, the limit is {MAX_VALUE_BYTES}: pop items first"
        )
    return True, queue, None


def _queue_take(key: str, old: bytes | None) -> Update:
    if old is None:
        return False, None, None
    first, *others = _unpack(old)
    return True, _pack(others) if others else None, first


def _queue_return(key: str, old: bytes | None, item: bytes) -> Update:
    return True, _pack([item, *_unpack(old)]), None


def _pack(items: list[bytes]) -> bytes:
    packed: bytes = msgpack.packb(items)
    return packed


def _unpack(queue: bytes | None) -> list[bytes]:
    items: list[bytes] = [] if queue is None else msgpack.unpackb(queue)
    return items
