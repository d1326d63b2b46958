"""`PrefixStore`: a view of the keys with a prefix in another store."""

from __future__ import annotations

from typing import Any

from aiocoll.store.base import Store
from aiocoll.store.commands import add_prefix, count_bytes
from aiocoll.store.view import StoreView

__all__ = ["PrefixStore"]


class PrefixStore(StoreView):
    """A view of `store` that adds ``prefix/`` to the name of every key and queue. Views may be nested.

    It uses the timeout of `store`. Closing it does nothing, since the owner of `store` closes that.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be str, got {type(prefix).__name__}")
        count_bytes("prefix", prefix)
        super().__init__(store)
        self._prefix = prefix + "/"

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        result = await super()._call(command, add_prefix(self._prefix, command, arguments))
        return [key.removeprefix(self._prefix) for key in result] if command == "list_keys" else result

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await super()._wait(command, add_prefix(self._prefix, command, arguments), timeout)
