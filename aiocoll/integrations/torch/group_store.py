"""`GroupStore`: the store of a `ProcessGroup` as a torch store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from aiocoll.loops import LoopThread
from aiocoll.store import Store

__all__ = ["GroupStore"]

T = TypeVar("T")


class GroupStore(dist.Store):  # type: ignore[misc]
    """A torch store that wraps `ProcessGroup.store`; any thread except the event loop's may use it.

    Args:
        store: the keys of a group.
        thread: the event loop of the group.
    """

    def __init__(self, store: Store, thread: LoopThread) -> None:
        super().__init__()
        self._store, self._thread = store, thread

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._run(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Wait until a key exists, and return its value."""
        return self._run(lambda: self._store.get(key, self.timeout))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the decimal number stored under a key, and return the sum."""
        return self._run(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` if the current value equals `expected`; return the value after the call."""
        return self._run(lambda: self._store.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._run(lambda: self._store.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._run(lambda: self._store.wait(keys, self.timeout if timeout is None else timeout))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        return self._run(lambda: self._store.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._run(self._store.num_keys)

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return self._run(self._store.list_keys)

    def append(self, key: str, value: bytes) -> None:
        """Append `value` to the stored value of a key."""
        self._run(lambda: self._store.append(key, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys exist, and return their values."""
        return self._run(lambda: self._store.multi_get(keys, self.timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Store several values."""
        self._run(lambda: self._store.multi_set(keys, values))

    def has_extended_api(self) -> bool:
        """Return whether the store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> GroupStore:
        """Return this store, because threads can share it."""
        return self

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._thread.start(call).result()
