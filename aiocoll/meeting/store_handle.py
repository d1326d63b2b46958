"""The store of one rank, shared by every `Job` that meets there."""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.store import Store

__all__ = ["StoreHandle"]


class StoreHandle:
    """A store that is closed by its last user, unless the caller owns it.

    Args:
        store: the caller's store, where the ranks meet; it stays open. None: make one.
        open_store: makes the store otherwise; the last user closes it.
        replaceable: whether another one may be opened if that is lost.
        holder: how the process that holds a meeting in the store calls this one; "" if there is none.
    """

    def __init__(
        self, store: Store | None, open_store: Callable[[], Store], replaceable: bool, holder: str = ""
    ) -> None:
        self.store = store if store is not None else open_store()
        self.replaceable = store is None and replaceable
        self.holder = holder
        self._owned = store is None
        self._open_store = open_store
        self._holders = 0

    def hold(self) -> None:
        """Add a user: the store stays open until as many calls of `drop`."""
        self._holders += 1

    async def drop(self) -> None:
        """Remove a user; the last one closes the store."""
        self._holders -= 1
        if self._owned and not self._holders:
            await self.store.aclose()

    def reopen(self) -> None:
        """Open a new store in place of a closed one."""
        self.store = self._open_store()
