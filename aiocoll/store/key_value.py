"""`KeyValueStore`: a store on any server of keys and values, from three methods."""

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
from aiocoll.store.base import Store, timed_out
from aiocoll.store.commands import MAX_VALUE_BYTES, keys_of
from aiocoll.store.polling import Poll
from aiocoll.store.values import UPDATES, Update

__all__ = ["QUEUE", "KeyValueStore", "refuse_reserved"]

#: Begins the name of the entry that holds a queue; no key may begin so.
QUEUE: Final = "aiocoll:queue:"
#: Seconds that a cancelled `queue_pop` waits for its request; a server that has stopped does not answer it.
_GIVE_BACK: Final = 0.2


class KeyValueStore(Store):
    """Base of a user's store: implement `read`, `compare_and_swap`, `names` and `aclose`; the rest is built on them.

    The three methods work on entries: a name (str, at most 1,038 bytes in UTF-8) and a value (bytes, at most 8 MiB).
    Each key is an entry of that name. A queue is one entry, which exists while the queue has items; its name begins
    with ``aiocoll:queue:``, and `ValueError` refuses such a key. Arguments have been checked when the three are called.

    The three should wait at most `timeout` seconds for a server that does not answer. They raise
    `StoreUnavailableError` then, and once the store is closed; `StoreError` if the server refuses an entry.

    The other calls are atomic for one key or queue, among any number of clients, with these limits:

    - A change is one `read` and one `compare_and_swap`, retried at once while other clients change the same entry. Some
      client succeeds at every try, but fairness is not guaranteed.
    - Waiting calls poll every 20 ms (at first every 1 ms), one missing key at a time. A key that exists only between
      two polls is not seen. Clients that wait at a queue are served in no particular order.
    - `multi_set` stores one key after the other: others may see the first ones, and an error leaves them stored.
    - `multi_get` reads until two readings in a row are equal, so it takes two per key at least; `check` reads once, one
      key after the other.
    - A queue holds 8 MiB in all, and each push and pop sends all of it. A cancelled `queue_pop` waits up to 0.2 s for
      the answer to its request; an item that it had taken is put back to the front, and another client may have popped
      the next. If the client dies at that moment, the item is lost.
    - The maximal number of entries and the order of `list_keys` are those of the server.

    Override calls that the server does better (a `multi_get` in one request, a `get` that is notified). An override
    gets the arguments of the caller, unchecked; the three methods of queues are overridden together or not at all.
    """

    def __init__(self, timeout: float | timedelta = 300.0) -> None:
        super().__init__(timeout)
        self._giving_back: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def read(self, name: str) -> bytes | None:
        """Return the value of an entry; None if there is no such entry.

        It must see all changes made before the call, by any client.

        Args:
            name: of the entry.
        """

    @abstractmethod
    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Store `new` under `name` if the value is `old`, in one step.

        Args:
            name: of the entry.
            old: value that it must have; None: it must be absent.
            new: value to store; None removes the entry.

        Returns:
            Whether it was stored. False means that nothing was changed; the caller reads again and retries.
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
            while (item := await self._take(keys[0])) is None:
                if not await poll.pause():
                    raise timed_out(type(self).__name__, command, keys, timeout)
            return item
        values = await self._collect(keys, poll, timeout)
        if command == "get":
            return values[0]
        if command == "wait":
            return None
        while values != (again := await self._collect(keys, poll, timeout)):
            values = again
            if not await poll.pause():
                raise StoreTimeoutError(
                    f"values of {len(keys)} keys kept changing for {timeout:g} s: get fewer at once"
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

    async def _collect(self, keys: list[str], poll: Poll, timeout: float) -> list[bytes]:
        """Read the values of all keys once none was missing."""
        in_time = True
        while True:
            found = {key: await self.read(key) for key in keys}
            values = [value for key in keys if (value := found[key]) is not None]
            if len(values) == len(keys):
                return values
            missing = [key for key in keys if found[key] is None]
            if not in_time:
                raise timed_out(type(self).__name__, "wait", missing, timeout)
            in_time = await poll.pause()
            while in_time and await self.read(missing[-1]) is None:
                in_time = await poll.pause()

    async def _take(self, key: str) -> bytes | None:
        """Remove the first item of a queue, if there is one; if the caller is cancelled, the item is put back."""
        taking = asyncio.ensure_future(self._update_queue(_queue_take, key))
        try:
            await asyncio.wait([taking])
        except asyncio.CancelledError:
            giving_back = asyncio.ensure_future(self._give_back(key, taking))
            self._giving_back.add(giving_back)
            giving_back.add_done_callback(self._giving_back.discard)
            await asyncio.wait([giving_back], timeout=_GIVE_BACK)
            raise
        item: bytes | None = taking.result()
        return item

    async def _give_back(self, key: str, taking: asyncio.Future[Any]) -> None:
        with suppress(StoreError):  # nothing was taken, or the store is gone with the queue
            item = await taking
            if item is not None:
                await self._update_queue(_queue_return, key, item)


def refuse_reserved(arguments: tuple[Any, ...]) -> None:
    """Raise `ValueError` for a key that begins like the entry of a queue; takes the arguments of a command."""
    for key in keys_of(arguments):
        if key.startswith(QUEUE):
            raise ValueError(f"key {key!r} begins with {QUEUE!r}, which is for queues: choose another name")


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
