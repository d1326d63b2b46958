"""The shortest correct store, which docs/guide.md shows."""

from aiocoll.errors import StoreError, StoreUnavailableError
from aiocoll.store import KeyValueStore


class MinimalStore(KeyValueStore):
    """A store for ranks that are tasks of one loop. Each rank opens its own handle on one dictionary."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        super().__init__()
        self._entries: dict[str, bytes] | None = entries

    async def read(self, name: str) -> bytes | None:
        return self._opened().get(name)

    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        entries = self._opened()
        if entries.get(name) != old:
            return False
        if new is None:
            entries.pop(name, None)
        elif old is None and len(entries) >= 65536:
            raise StoreError("the store is full: 65536 keys and queued items")
        else:
            entries[name] = new
        return True

    async def names(self) -> list[str]:
        return list(self._opened())

    async def aclose(self) -> None:
        self._entries = None

    def _opened(self) -> dict[str, bytes]:
        if self._entries is None:
            raise StoreUnavailableError("this MinimalStore is closed: make a new one")
        return self._entries
