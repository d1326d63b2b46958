"""`Store`: the interface of every store.

A store is a small dictionary that the ranks of a job share. Keys are str, values are bytes (a str is stored in UTF-8).
It also has first-in-first-out queues with names of their own. Ranks meet through a store, and send arrays through
groups. The public methods of `Store` check arguments and pass them on as commands (`aiocoll.store.commands`). `_call`
carries out commands that return at once, and `_wait` commands that wait for keys. `KeyValueStore` implements both with
three methods, which a new store has to provide.
"""

from __future__ import annotations

import asyncio
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TypeVar

from aiocoll.errors import StoreError, StoreTimeoutError
from aiocoll.numerals import to_float, to_int
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.commands import check_arguments, count_bytes
from aiocoll.user_code import describe

__all__ = ["GRACE", "Store", "await_reply", "check_world_size", "seconds", "timeout_error", "wait_until_done"]

T = TypeVar("T")

#: Seconds between the timeout of a request and its cancellation, if the store does not answer.
GRACE = 0.7
#: Loop iterations between timeout and cancellation, so that a reply that arrived while the loop was blocked is read.
_TURNS = 16

#: Loop iterations needed to read and deliver a reply that has arrived.
_TURNS_TO_READ = 4


class Store(ABC):
    """Base class of all stores. To write a store, see `KeyValueStore`.

    Every method raises `TypeError` or `ValueError` for an invalid argument. It raises `StoreError` for an argument over
    a limit: 1 KiB for keys, 8 MiB for values, and in all 65,536 keys and queued items and 256 MiB. It raises
    `StoreUnavailableError` if the store is closed or unreachable. A cancelled wait leaves nothing behind, and its queue
    keeps the item.

    Cost:
        With a `HashStore` a few microseconds per call, with a `FileStore` a lock and at most one write, with a
        `TCPStore` one round trip, with a `RedisStore` one or two. The store notifies waiting calls; only a `FileStore`
        polls, every 20 ms.
    """

    #: Whether requests may remain without a reply, so that every call needs a time limit.
    _may_stop = True

    def __init__(self, timeout: float | timedelta = 300.0) -> None:
        self._timeout = seconds(timeout)

    @property
    def trouble(self) -> str | None:
        """While attempts to connect fail: the store's address and the reason. Otherwise None."""
        return None

    @property
    def reached(self) -> str:
        """Numeric address by which this process has reached the store; "" if there is none."""
        return ""

    @property
    def timeout(self) -> float:
        """Default timeout of calls in seconds."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        self._timeout = seconds(timeout)

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set the default timeout of calls.

        Args:
            timeout: seconds.
        """
        self.timeout = timeout

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def _sees_disconnects(self) -> bool:
        """Return whether the store sets keys of `_hold` to `LEFT` when this client disconnects or dies."""
        return False

    async def set(self, key: str, value: bytes | str) -> None:
        """Store `value` under `key`, replacing any value.

        Args:
            key: at most 1 KiB in UTF-8.
            value: at most 8 MiB; a str is stored in UTF-8.

        Raises:
            StoreError: a limit was exceeded; nothing was changed.
        """
        await self._call_checked("set", key, _encode(value))

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        """Wait until `key` exists, and return its value.

        Args:
            key: name of the key.
            timeout: seconds to wait; 0 looks once, `inf` waits without limit, None is the default timeout of the store.

        Returns:
            The value.

        Raises:
            StoreTimeoutError: the key did not appear in time.
        """
        value: bytes = await self._wait_checked("get", timeout, key)
        return value

    async def add(self, key: str, amount: int) -> int:
        """Add `amount` to the decimal number under `key`; an absent key counts as 0.

        Args:
            key: name of the key.
            amount: the number to add, which may be negative; fits 64 bits.

        Returns:
            The sum, which is now stored.

        Raises:
            StoreError: the value is not a decimal number, or the sum does not fit 64 bits; nothing was changed.
        """
        with suppress(TypeError):  # `check_arguments` raises the error below
            amount = operator.index(amount)
        total: int = await self._call_checked("add", key, amount)
        return total

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store `desired` if the value is `expected`, or if `key` is absent and `expected` is empty.

        The result does not show whether this client stored `desired` or found it there. To elect a winner, let each
        client propose a different value.

        Args:
            key: name of the key.
            expected: current value for which `desired` is stored.
            desired: value to store.

        Returns:
            The value now stored; `expected` if the key was absent and stays absent.

        Raises:
            StoreError: a limit was exceeded; nothing was changed.
        """
        value: bytes = await self._call_checked("compare_set", key, _encode(expected), _encode(desired))
        return value

    async def check(self, keys: Iterable[str]) -> bool:
        """Return whether all `keys` exist, without waiting.

        Args:
            keys: names of the keys.

        Returns:
            Whether all keys exist.
        """
        present: bool = await self._call_checked("check", _to_list("keys", keys))
        return present

    async def wait(self, keys: Iterable[str], timeout: float | timedelta | None = None) -> None:
        """Wait until all `keys` exist.

        Args:
            keys: names of the keys.
            timeout: seconds to wait; 0 looks once, `inf` waits without limit, None is the default timeout of the store.

        Raises:
            StoreTimeoutError: some keys did not appear in time; the message lists them.
        """
        await self._wait_checked("wait", timeout, _to_list("keys", keys))

    async def delete_key(self, key: str) -> bool:
        """Remove `key`.

        Args:
            key: name of the key.

        Returns:
            Whether the key existed.
        """
        existed: bool = await self._call_checked("delete_key", key)
        return existed

    async def num_keys(self) -> int:
        """Count the keys.

        Returns:
            The number of keys, without queues.
        """
        count: int = await self._call_checked("num_keys", "")
        return count

    async def append(self, key: str, value: bytes | str) -> None:
        """Append `value` to the value of `key`; an absent key counts as empty.

        Args:
            key: name of the key.
            value: bytes to append; the new value may have at most 8 MiB.

        Raises:
            StoreError: a limit was exceeded; nothing was changed.
        """
        await self._call_checked("append", key, _encode(value))

    async def multi_get(self, keys: Iterable[str], timeout: float | timedelta | None = None) -> list[bytes]:
        """Wait until all `keys` exist and read them atomically.

        Args:
            keys: names of the keys.
            timeout: seconds to wait; 0 looks once, `inf` waits without limit, None is the default timeout of the store.

        Returns:
            The values, in the order of `keys`.

        Raises:
            StoreTimeoutError: some keys did not appear in time; the message lists them.
        """
        values: list[bytes] = await self._wait_checked("multi_get", timeout, _to_list("keys", keys))
        return values

    async def multi_set(self, keys: Iterable[str], values: Iterable[bytes | str]) -> None:
        """Store one value per key, all or none.

        Args:
            keys: names of the keys.
            values: one value per key; at most 16 MiB in all in a `TCPStore`, 32 MiB in a `FileStore`.

        Raises:
            StoreError: a limit was exceeded; nothing was changed.
        """
        await self._call_checked(
            "multi_set", _to_list("keys", keys), [_encode(value) for value in _to_list("values", values)]
        )

    async def list_keys(self) -> list[str]:
        """List the keys.

        Returns:
            All keys, without queues. They are in the order in which they were first set, but a `KeyValueStore` lists
            them in the order of its server.
        """
        keys: list[str] = await self._call_checked("list_keys", "")
        return keys

    async def queue_push(self, key: str, value: bytes | str) -> None:
        """Append an item to a queue. A queue and a key of the same name are unrelated.

        Args:
            key: name of the queue, at most 1 KiB in UTF-8.
            value: the item, at most 8 MiB.

        Raises:
            StoreError: a limit was exceeded; nothing was changed.
        """
        await self._call_checked("queue_push", key, _encode(value))

    async def queue_pop(self, key: str, block: bool = True, timeout: float | timedelta | None = None) -> bytes:
        """Remove the first item of a queue; waiting calls are served in order.

        Args:
            key: name of the queue.
            block: False raises `StoreTimeoutError` at once if the queue is empty.
            timeout: seconds to wait for an item; `inf` waits without limit, None is the default timeout of the store.

        Returns:
            The item.

        Raises:
            StoreTimeoutError: the queue had no item in time.
        """
        value: bytes = await self._wait_checked("queue_pop", timeout if block else 0.0, key)
        return value

    async def queue_len(self, key: str) -> int:
        """Count the items of a queue.

        Args:
            key: name of the queue.

        Returns:
            The number of items; 0 for a queue that was never used.
        """
        count: int = await self._call_checked("queue_len", key)
        return count

    @abstractmethod
    async def aclose(self) -> None:
        """Close the store; idempotent. Pending and later calls raise `StoreUnavailableError`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @abstractmethod
    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a command of `COMMANDS`, whose arguments the caller has checked."""

    @abstractmethod
    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Carry out a waiting command of `WAITS`, whose arguments the caller has checked."""

    async def _hold(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Carry out `compare_set`. When this client disconnects later, the store sets the key to `LEFT`."""
        value: bytes = await self._call_checked("hold", key, expected, desired)
        return value

    async def _call_checked(self, command: str, *arguments: Any) -> Any:
        check_arguments(command, arguments)
        request = self._run_uncancelled(command, self._call, arguments)
        return await (await_reply(request, self._timeout, self, command) if self._may_stop else request)

    async def _wait_checked(self, command: str, timeout: float | timedelta | None, *arguments: Any) -> Any:
        check_arguments(command, arguments)
        limit = self.timeout if timeout is None else seconds(timeout)
        request = self._run_uncancelled(command, self._wait, arguments, limit)
        return await (await_reply(request, limit, self, command) if self._may_stop else request)

    async def _run_uncancelled(self, command: str, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """Await `call(command, ...)`; raise `StoreError` if a custom store raises `CancelledError` by itself.

        Otherwise it would look like a cancellation of the caller.
        """
        try:
            return await call(command, *args)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StoreError(
                f"{type(self).__name__} raised {describe(error)} in {command}(), although nothing cancelled the "
                "call; change the store to raise StoreError instead"
            ) from error


def seconds(timeout: float | timedelta) -> float:
    """Return `timeout` in seconds; raise `ValueError` for NaN and negative numbers."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = to_float(value, "timeout", "seconds or a timedelta")
    if math.isnan(number) or number < 0:
        raise ValueError(
            f"timeout must not be negative, got {timeout}: use 0 to look once, math.inf to wait without limit"
        )
    return number


async def await_reply(request: Coroutine[Any, Any, T], timeout: float, store: Store, command: str) -> T:
    """Await `request`, which ends by itself within `timeout` seconds unless `store` does not answer.

    Raises:
        StoreTimeoutError: the request had not ended `GRACE` seconds after its timeout, and was cancelled.
    """
    if timeout == math.inf:
        return await request
    try:
        runtime, limit = Runtime.of(running_loop()), asyncio.timeout(None)
    except RuntimeError:
        request.close()  # without this, Python warns that the coroutine was never awaited
        raise
    pause = max(0.0, GRACE + min(0.0, timeout)) / _TURNS
    timer: asyncio.TimerHandle

    def turn(left: int) -> None:
        nonlocal timer
        if left:
            timer = runtime.call_later(pause, turn, left - 1)
        else:
            limit.reschedule(runtime.time())

    timer = runtime.call_later(max(0.0, timeout), turn, _TURNS)
    try:
        async with limit:
            return await request
    except TimeoutError as error:
        if limit.expired() and not isinstance(error, StoreTimeoutError):
            reason = store.trouble or f"{store} does not answer"
            raise StoreTimeoutError(f"{command} failed: {reason}") from None
        raise
    finally:
        timer.cancel()


async def wait_until_done(future: asyncio.Future[Any], timeout: float) -> bool:
    """Wait up to `timeout` seconds until `future` is done, and return whether it is.

    The future is never cancelled. So it keeps a result that arrives together with a timeout or a cancellation. After
    the timeout, a loop that was blocked first reads the data that has arrived meanwhile.
    """
    await asyncio.wait([future], timeout=None if timeout == math.inf else timeout)
    for _ in range(_TURNS_TO_READ):
        if future.done():
            break
        await asyncio.sleep(0)
    return future.done()


def timeout_error(where: str, command: str, missing: list[str], timeout: float) -> StoreTimeoutError:
    """Return the error for a wait that timed out; it names at most 16 of the `missing` keys, or the empty queue."""
    names = ", ".join(map(repr, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    if command == "queue_pop":
        return StoreTimeoutError(f"queue {names} of {where} had no item within {timeout:g} s")
    return StoreTimeoutError(
        f"{where} did not get {'key' if len(missing) == 1 else 'keys'} {names} within {timeout:g} s"
    )


def check_world_size(world_size: int | None) -> int | None:
    """Check and return the argument `world_size` of a store. Return None for None and -1: any number of clients."""
    number = -1 if world_size is None else to_int(world_size, "world_size", "an int or None")
    if number < 1 and number != -1:
        raise ValueError(f"world_size must be at least 1, or -1 for any number, got {number}")
    return None if number == -1 else number


def _encode(value: Any) -> Any:
    """Encode `value` in UTF-8 if it is a str; return other objects unchanged."""
    if isinstance(value, str):
        count_bytes("value", value)
        return value.encode()
    return value


def _to_list(name: str, items: Any) -> list[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise TypeError(f"{name} must be a list, got {type(items).__name__}")
    return list(items)
