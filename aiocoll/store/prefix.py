"""`PrefixStore`: a part of another store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from aiocoll.store.base import Store
from aiocoll.store.commands import prefixed

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """A view of `store` in which every key and queue is called ``prefix/key``; may be nested.

    It has no timeout of its own, and closing it does nothing: the owner of the store closes that.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be str, got {type(prefix).__name__}")
        if not isinstance(store, Store):
            raise TypeError(f"store must be a Store, got {type(store).__name__}")
        self._prefix = prefix + "/"
        self._store = store

    @property
    def trouble(self) -> str | None:
        """`trouble` of the store below."""
        return self._store.trouble

    @property
    def reached(self) -> str:
        """`reached` of the store below."""
        return self._store.reached

    @property
    def timeout(self) -> float:
        """`timeout` of the store below."""
        return self._store.timeout

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        self._store.timeout = timeout

    async def aclose(self) -> None:
        """Do nothing; the store below stays open."""

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        inner = prefixed(self._prefix, command, arguments)
        if command == "num_keys":
            return await self._store._checked(command, *inner)
        if command == "list_keys":
            keys = await self._store._checked(command, *inner)
            return [key.removeprefix(self._prefix) for key in keys]
        return await getattr(self._store, command)(*inner)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await getattr(self._store, command)(*prefixed(self._prefix, command, arguments), timeout=timeout)
