"""`Store`: the interface of every store.

A store is a small dictionary that the ranks of a job share: str keys, bytes values (a str is stored in UTF-8), plus
first-in-first-out queues with names of their own. Ranks meet through it; arrays are sent by groups. The public methods
of `Store` check arguments and pass them on as commands (`aiocoll.store.commands`): `_call` carries out those that are
answered at once, `_wait` those that wait for keys. `KeyValueStore` implements both by three methods that a new store
has to write.
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

__all__ = ["GRACE", "Store", "answered", "count_of_clients", "seconds", "settled", "timed_out"]

T = TypeVar("T")

#: Seconds beyond its timeout after which a call to a store that has stopped answering is cancelled.
GRACE = 0.7
#: Loop iterations within these seconds: an answer that arrived while the loop was blocked counts.
_TURNS = 16

#: Turns of the loop in which an answer that has arrived is read and passed on.
_TURNS_TO_READ = 4


class Store(ABC):
    """Base of all stores; to write one, see `KeyValueStore`.

    Every method raises `TypeError` or `ValueError` for a wrong argument, `StoreError` for one over a limit (keys 1 KiB,
    values 8 MiB; 65,536 keys and queued items, 256 MiB in all), and `StoreUnavailableError` once the store is closed or
    unreachable. Cancelling a wait leaves nothing behind, and a queue keeps its item.

    Cost of a call: with a `HashStore` a few microseconds, with a `FileStore` a lock and at most one write, with a
    `TCPStore` one round trip, with a `RedisStore` one or two. The store notifies a wait when it ends; only a file is
    polled, every 20 ms.
    """

    #: Whether requests may stay unanswered, so that every call needs a time limit.
    _may_stop = True

    def __init__(self, timeout: float | timedelta = 300.0) -> None:
        self._timeout = seconds(timeout)

    @property
    def trouble(self) -> str | None:
        """Address of the store and why it cannot be reached, while connecting is still being tried."""
        return None

    @property
    def reached(self) -> str:
        """The numeric address by which this process has reached the store, "" if it has none."""
        return ""

    @property
    def timeout(self) -> float:
        """Seconds a call waits when it is given no timeout."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        self._timeout = seconds(timeout)

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set `timeout`.

        Args:
            timeout: seconds a call waits when it is given no timeout.
        """
        self.timeout = timeout

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def _sees_disconnects(self) -> bool:
        """Whether `_hold` gives a key up when this client disconnects or dies."""
        return False

    async def set(self, key: str, value: bytes | str) -> None:
        """Store `value` under `key`, replacing any value.

        Args:
            key: at most 1 KiB in UTF-8.
            value: at most 8 MiB; a str is stored in UTF-8.

        Raises:
            StoreError: a limit; nothing was changed.
        """
        await self._checked("set", key, _encoded(value))

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        """Wait until `key` exists.

        Args:
            key: its name.
            timeout: seconds to wait; 0 looks once, `inf` waits for ever, None is the store's own.

        Returns:
            Its value.

        Raises:
            StoreTimeoutError: it did not appear in time.
        """
        value: bytes = await self._waited("get", timeout, key)
        return value

    async def add(self, key: str, amount: int) -> int:
        """Add `amount` to the decimal number under `key`; an absent key counts as 0.

        Args:
            key: its name.
            amount: may be negative; fits 64 bits.

        Returns:
            The sum, which is stored.

        Raises:
            StoreError: the value is not a decimal number, or the sum does not fit 64 bits; nothing was changed.
        """
        with suppress(TypeError):  # the check of all arguments refuses it
            amount = operator.index(amount)
        total: int = await self._checked("add", key, amount)
        return total

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store `desired` if the value is `expected`, or if `key` is absent and `expected` is empty.

        The result is the same for the client that stored `desired` and one that found it there: to find a winner, let
        each client propose a different value.

        Args:
            key: its name.
            expected: current value for which `desired` is stored.
            desired: value to store.

        Returns:
            The value now stored; `expected` if the key is absent and stays so.

        Raises:
            StoreError: a limit; nothing was changed.
        """
        value: bytes = await self._checked("compare_set", key, _encoded(expected), _encoded(desired))
        return value

    async def check(self, keys: Iterable[str]) -> bool:
        """Return whether keys exist, without waiting.

        Args:
            keys: their names.

        Returns:
            Whether all of them exist.
        """
        present: bool = await self._checked("check", _listed("keys", keys))
        return present

    async def wait(self, keys: Iterable[str], timeout: float | timedelta | None = None) -> None:
        """Wait until all `keys` exist.

        Args:
            keys: their names.
            timeout: seconds to wait; 0 looks once, `inf` waits for ever, None is the store's own.

        Raises:
            StoreTimeoutError: some did not appear in time; the message lists them.
        """
        await self._waited("wait", timeout, _listed("keys", keys))

    async def delete_key(self, key: str) -> bool:
        """Remove `key`.

        Args:
            key: its name.

        Returns:
            Whether it existed.
        """
        existed: bool = await self._checked("delete_key", key)
        return existed

    async def num_keys(self) -> int:
        """Count the keys.

        Returns:
            Their number; queues are not counted.
        """
        count: int = await self._checked("num_keys", "")
        return count

    async def append(self, key: str, value: bytes | str) -> None:
        """Append `value` to what is stored under `key`; an absent key counts as empty.

        Args:
            key: its name.
            value: appended to the current value; both together are at most 8 MiB.

        Raises:
            StoreError: a limit; nothing was changed.
        """
        await self._checked("append", key, _encoded(value))

    async def multi_get(self, keys: Iterable[str], timeout: float | timedelta | None = None) -> list[bytes]:
        """Wait until all `keys` exist and read them atomically.

        Args:
            keys: their names.
            timeout: seconds to wait; 0 looks once, `inf` waits for ever, None is the store's own.

        Returns:
            Their values, in the order of `keys`.

        Raises:
            StoreTimeoutError: some did not appear in time; the message lists them.
        """
        values: list[bytes] = await self._waited("multi_get", timeout, _listed("keys", keys))
        return values

    async def multi_set(self, keys: Iterable[str], values: Iterable[bytes | str]) -> None:
        """Store one value per key, all or none.

        Args:
            keys: their names.
            values: as many; 16 MiB in all in a `TCPStore`, 32 MiB in a `FileStore`.

        Raises:
            StoreError: a limit; nothing was changed.
        """
        await self._checked(
            "multi_set", _listed("keys", keys), [_encoded(value) for value in _listed("values", values)]
        )

    async def list_keys(self) -> list[str]:
        """List the keys.

        Returns:
            All keys, in the order they were first set, or in that of the server of a `KeyValueStore`; queues are not
            listed.
        """
        keys: list[str] = await self._checked("list_keys", "")
        return keys

    async def queue_push(self, key: str, value: bytes | str) -> None:
        """Append an item to a queue; a queue and a key of the same name are unrelated.

        Args:
            key: name of the queue, at most 1 KiB in UTF-8.
            value: the item, at most 8 MiB.

        Raises:
            StoreError: a limit; nothing was changed.
        """
        await self._checked("queue_push", key, _encoded(value))

    async def queue_pop(self, key: str, block: bool = True, timeout: float | timedelta | None = None) -> bytes:
        """Remove the first item of a queue; waiting calls are served in order.

        Args:
            key: name of the queue.
            block: False raises `StoreTimeoutError` at once if the queue is empty.
            timeout: seconds to wait for an item; `inf` waits for ever, None is the store's own.

        Returns:
            The item.

        Raises:
            StoreTimeoutError: there was none in time.
        """
        value: bytes = await self._waited("queue_pop", timeout if block else 0.0, key)
        return value

    async def queue_len(self, key: str) -> int:
        """Count the items of a queue.

        Args:
            key: name of the queue.

        Returns:
            Their number; 0 for a queue that was never used.
        """
        count: int = await self._checked("queue_len", key)
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
        """Carry out one of `COMMANDS`, its arguments already checked."""

    @abstractmethod
    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Carry out one of `WAITS`, its arguments already checked."""

    async def _hold(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Do what `compare_set` does; a store that sees this client disconnect replaces `desired` by `LEFT`."""
        value: bytes = await self._checked("hold", key, expected, desired)
        return value

    async def _checked(self, command: str, *arguments: Any) -> Any:
        check_arguments(command, arguments)
        request = self._uncancelled(command, self._call, arguments)
        return await (answered(request, self._timeout, self, command) if self._may_stop else request)

    async def _waited(self, command: str, timeout: float | timedelta | None, *arguments: Any) -> Any:
        check_arguments(command, arguments)
        limit = self.timeout if timeout is None else seconds(timeout)
        request = self._uncancelled(command, self._wait, arguments, limit)
        return await (answered(request, limit, self, command) if self._may_stop else request)

    async def _uncancelled(self, command: str, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """Await a call; a `CancelledError` of a custom store must not look like a cancellation of its caller."""
        try:
            return await call(command, *args)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StoreError(
                f"{type(self).__name__} raised {describe(error)} in {command}(), and no task had cancelled the call"
            ) from error


def seconds(timeout: float | timedelta) -> float:
    """Return `timeout` in seconds; refuse a negative one and NaN."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = to_float(value, "timeout", "seconds or a timedelta")
    if math.isnan(number) or number < 0:
        raise ValueError(f"timeout must not be negative, got {timeout}: use 0 to look once, math.inf to wait for ever")
    return number


async def answered(request: Coroutine[Any, Any, T], timeout: float, store: Store, command: str) -> T:
    """Return the result of `request`, which ends within `timeout` seconds by itself unless `store` has stopped.

    Raises:
        StoreTimeoutError: the request had not ended `GRACE` seconds later, and was cancelled.
    """
    if timeout == math.inf:
        return await request
    try:
        runtime, limit = Runtime.of(running_loop()), asyncio.timeout(None)
    except RuntimeError:
        request.close()  # it was not awaited, and Python would warn
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
            raise StoreTimeoutError(f"{command} failed: {reason}") from error
        raise
    finally:
        timer.cancel()


async def settled(future: asyncio.Future[Any], timeout: float) -> bool:
    """Wait until `future` is done; False when `timeout` seconds passed first.

    The future itself is never cancelled: a result that arrives together with a timeout or a cancellation is kept in it.
    A loop that was blocked reads what has arrived meanwhile before the timeout counts.
    """
    await asyncio.wait([future], timeout=None if timeout == math.inf else timeout)
    for _ in range(_TURNS_TO_READ):
        if future.done():
            break
        await asyncio.sleep(0)
    return future.done()


def timed_out(where: str, command: str, missing: list[str], timeout: float) -> StoreTimeoutError:
    """Return the error of a wait that ended with `missing` keys (or an empty queue), naming at most 16 of them."""
    names = ", ".join(map(repr, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    if command == "queue_pop":
        return StoreTimeoutError(f"queue {names} of {where} had no item within {timeout:g} s")
    return StoreTimeoutError(
        f"{where} did not get {'key' if len(missing) == 1 else 'keys'} {names} within {timeout:g} s"
    )


def count_of_clients(world_size: int | None) -> int | None:
    """Return the number of clients of a store; None if it may be any, as None and -1 say."""
    number = -1 if world_size is None else to_int(world_size, "world_size", "an int or None")
    if number < 1 and number != -1:
        raise ValueError(f"world_size must be at least 1, or -1 for any number, got {number}")
    return None if number == -1 else number


def _encoded(value: Any) -> Any:
    """Return text in UTF-8, and anything else as it is."""
    if isinstance(value, str):
        count_bytes("value", value)
        return value.encode()
    return value


def _listed(name: str, items: Any) -> list[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise TypeError(f"{name} must be a list, got {type(items).__name__}")
    return list(items)
