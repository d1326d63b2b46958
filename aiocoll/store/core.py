"""`StoreCore`: the contents of a store and its pending waits, as a plain synchronous object.

`HashStore` and the TCP server have one, which calls back when a wait ends. `FileStore` replays its log into one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiocoll.errors import StoreError
from aiocoll.store.commands import MAX_ENTRIES, MAX_TOTAL_BYTES, keys_of
from aiocoll.store.values import UPDATES, Update

__all__ = ["PendingWait", "StoreCore"]


class PendingWait:
    """A wait in progress. It watches one missing key at a time, so a wait for n keys takes O(n) in total."""

    __slots__ = ("command", "deliver", "keys", "watched")

    def __init__(self, command: str, keys: list[str], deliver: Callable[[Any], None]) -> None:
        self.command = command
        self.keys = keys
        self.deliver = deliver
        # Watch the last key first: ranks mostly arrive in order, so a thousand waiting ranks wake only once.
        self.watched = max(0, len(keys) - 1)


class StoreCore:
    """Keys, queues and pending waits of a store. Callers must first check arguments by `check_arguments`."""

    def __init__(self) -> None:
        #: Number of commands so far that have changed keys or queues.
        self.changes = 0
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._watchers: dict[str, list[PendingWait]] = {}
        self._poppers: dict[str, deque[PendingWait]] = {}
        self._queued = 0
        self._nbytes = 0
        self._handlers: dict[str, Callable[..., Any]] = {
            **{command: partial(self._update, update) for command, update in UPDATES.items()},
            "check": self._check,
            "num_keys": self._num_keys,
            "multi_set": self._multi_set,
            "list_keys": self._list_keys,
            "queue_push": self._queue_push,
            "queue_return": self._queue_return,
            "queue_len": self._queue_len,
            "queue_take": self._queue_take,
        }

    def apply(self, command: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a command of `COMMANDS`. If it would exceed a limit, change nothing and raise `StoreError`."""
        return self._handlers[command](*arguments)

    def start(self, command: str, arguments: tuple[Any, ...], deliver: Callable[[Any], None]) -> PendingWait | None:
        """Start a waiting command. `deliver(result)` is called at once, or by the command that ends the wait.

        Returns:
            The wait, for `drop`; None if the result has been delivered.
        """
        keys = keys_of(arguments)
        waiter = PendingWait(command, keys, deliver)
        if command != "queue_pop":
            return waiter if self._watch(waiter) else None
        item = self._queue_take(keys[0])
        if item is not None:
            deliver(item)
            return None
        self._poppers.setdefault(keys[0], deque()).append(waiter)
        return waiter

    def drop(self, waiter: PendingWait) -> None:
        """Cancel a wait whose result has not been delivered."""
        waiting: dict[str, Any] = self._poppers if waiter.command == "queue_pop" else self._watchers
        key = waiter.keys[waiter.watched]
        waiting[key].remove(waiter)
        if not waiting[key]:
            del waiting[key]

    def missing(self, command: str, arguments: tuple[Any, ...]) -> list[str]:
        """Return the missing keys of a waiting command, or the name of its queue if that queue is empty."""
        present: Mapping[str, Any] = self._queues if command == "queue_pop" else self._values
        return [key for key in keys_of(arguments) if key not in present]

    def forget(self, kept: str | None) -> None:
        """Remove all keys and queues, except those whose names begin with `kept`."""

        def is_removed(name: str) -> bool:
            return kept is None or not name.startswith(kept)

        for key in list(filter(is_removed, self._values)):
            self._reserve(0, -len(self._values.pop(key)))
        for queue in list(filter(is_removed, self._queues)):
            while self._queue_take(queue) is not None:
                pass

    def read(self, command: str, keys: list[str]) -> Any:
        """Return the result of a wait whose keys all exist."""
        if command == "get":
            return self._values[keys[0]]
        return [self._values[key] for key in keys] if command == "multi_get" else None

    def _watch(self, waiter: PendingWait) -> bool:
        """Deliver the result if every key exists, else watch the next missing key; return whether the wait continues.

        Keys that existed at an earlier check may have been deleted, so all are checked.
        """
        count = len(waiter.keys)
        for i in range(waiter.watched, waiter.watched + count):
            if waiter.keys[i % count] not in self._values:
                waiter.watched = i % count
                self._watchers.setdefault(waiter.keys[waiter.watched], []).append(waiter)
                return True
        waiter.deliver(self.read(waiter.command, waiter.keys))
        return False

    def _store(self, items: Mapping[str, bytes]) -> None:
        old = [self._values[key] for key in items if key in self._values]
        if old == list(items.values()):
            return  # nothing changes, so a file store need not record it
        self._reserve(len(items) - len(old), sum(map(len, items.values())) - sum(map(len, old)))
        self._values.update(items)
        for key in items:
            for waiter in self._watchers.pop(key, ()):
                self._watch(waiter)

    def _reserve(self, entries: int, nbytes: int) -> None:
        if entries > 0 and len(self._values) + self._queued + entries > MAX_ENTRIES:
            raise StoreError(f"the store is full: {MAX_ENTRIES} keys and queued items; delete unused keys")
        if nbytes > 0 and self._nbytes + nbytes > MAX_TOTAL_BYTES:
            raise StoreError(f"the store is full: {MAX_TOTAL_BYTES} bytes of values; delete unused keys")
        self._nbytes += nbytes
        self.changes += 1

    def _update(self, update: Callable[..., Update], key: str, *arguments: Any) -> Any:
        old = self._values.get(key)
        changes, new, result = update(key, old, *arguments)
        if changes and new is not None:
            self._store({key: new})
        elif changes and old is not None:
            del self._values[key]
            self._reserve(-1, -len(old))
        return result

    def _multi_set(self, keys: list[str], values: list[bytes]) -> None:
        if keys:
            self._store(dict(zip(keys, values, strict=True)))

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _num_keys(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self._values) if prefix else len(self._values)

    def _list_keys(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    def _queue_push(self, key: str, value: bytes) -> None:
        if not self._hand_over(key, value):
            self._reserve(1, len(value))
            self._queued += 1
            self._queues.setdefault(key, deque()).append(value)

    def _queue_return(self, key: str, value: bytes) -> None:
        """Put the item of a cancelled pop back to the front of its queue, even beyond the limits."""
        if not self._hand_over(key, value):
            self._queued += 1
            self._nbytes += len(value)
            self.changes += 1
            self._queues.setdefault(key, deque()).appendleft(value)

    def _hand_over(self, key: str, value: bytes) -> bool:
        poppers = self._poppers.get(key)
        if not poppers:
            return False
        waiter = poppers.popleft()
        if not poppers:
            del self._poppers[key]
        waiter.deliver(value)
        return True

    def _queue_len(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def _queue_take(self, key: str) -> bytes | None:
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        self._queued -= 1
        self._reserve(0, -len(value))
        return value
