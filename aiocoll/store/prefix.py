"""`PrefixStore`: a part of another store."""

from __future__ import annotations

from typing import Any

from aiocoll.store.base import Store
from aiocoll.store.commands import count_bytes, prefixed
from aiocoll.store.view import StoreView

__all__ = ["PrefixStore"]


class PrefixStore(StoreView):
    """A view of `store` in which every key and queue is called ``prefix/key``; may be nested.

    It has no timeout of its own, and closing it does nothing: the owner of the store closes that.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be str, got {type(prefix).__name__}")
        count_bytes("prefix", prefix)
        super().__init__(store)
        self._prefix = prefix + "/"

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        result = await super()._call(command, prefixed(self._prefix, command, arguments))
        return [key.removeprefix(self._prefix) for key in result] if command == "list_keys" else result

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await super()._wait(command, prefixed(self._prefix, command, arguments), timeout)
