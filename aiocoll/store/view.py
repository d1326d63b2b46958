"""`StoreView`: base class of stores that forward their requests to another store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from aiocoll.store.base import Store

__all__ = ["StoreView"]


class StoreView(Store):
    """A view of `store`, with the timeout of `store`. Closing a view does nothing: the owner closes `store`."""

    _may_stop = False

    def __init__(self, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store must be a Store, got {type(store).__name__}")
        self._store = store

    @property
    def trouble(self) -> str | None:
        """Attribute `trouble` of the wrapped store."""
        return self._store.trouble

    @property
    def reached(self) -> str:
        """Attribute `reached` of the wrapped store."""
        return self._store.reached

    @property
    def timeout(self) -> float:
        """Attribute `timeout` of the wrapped store."""
        return self._store.timeout

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        self._store.timeout = timeout

    @property
    def _sees_disconnects(self) -> bool:
        return self._store._sees_disconnects

    def __str__(self) -> str:
        return str(self._store)

    async def aclose(self) -> None:
        """Do nothing: the wrapped store stays open."""

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        if command in ("num_keys", "list_keys", "hold"):  # commands that take a prefix, or that no public method makes
            return await self._store._call_checked(command, *arguments)
        return await getattr(self._store, command)(*arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await getattr(self._store, command)(*arguments, timeout=timeout)
