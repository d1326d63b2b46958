"""Reference-counted handle of one rank's store, shared by every `Job` that meets in this store."""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.store import Store

__all__ = ["StoreHandle"]


class StoreHandle:
    """A reference-counted store: the last user closes it, unless the caller owns it.

    Args:
        store: the caller's store, where the ranks meet; it stays open. None: open one.
        open_store: opens the store in that case; the last user closes it.
        replaceable: whether another store may be opened if this one is lost.
        holder: the name of this process in a meeting; "" outside of a meeting.

    Attributes:
        once: whether the ranks may meet only once in this store.
    """

    def __init__(
        self, store: Store | None, open_store: Callable[[], Store], replaceable: bool, holder: str = ""
    ) -> None:
        self.store = store if store is not None else open_store()
        self.replaceable = store is None and replaceable
        self.holder = holder
        self.once = False
        self._owned = store is None
        self._open_store = open_store
        self._holders = 0

    def hold(self) -> None:
        """Add a user: the store stays open until each user has called `drop`."""
        self._holders += 1

    async def drop(self) -> None:
        """Remove a user; the last one closes the store."""
        self._holders -= 1
        if self._owned and not self._holders:
            await self.store.aclose()

    def reopen(self) -> None:
        """Open a new store in place of a closed one."""
        self.store = self._open_store()
