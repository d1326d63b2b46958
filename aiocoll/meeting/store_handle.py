"""The store of one rank, held by every home that meets there."""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.store import Store

__all__ = ["StoreHandle"]


class StoreHandle:
    """A store, and who closes it.

    Args:
        store: where the ranks meet, if the caller has a store; it stays open.
        open_store: makes one otherwise; it is closed by the last home.
        hosts: that store is served by this rank.
    """

    def __init__(self, store: Store | None, open_store: Callable[[], Store], hosts: bool) -> None:
        self.store = store if store is not None else open_store()
        #: Another one may be opened if this one is lost.
        self.replaceable = store is None and not hosts
        self._owned = store is None
        self._open_store = open_store
        self._holders = 0

    def hold(self) -> None:
        """Keep the store open, until as many calls of `drop`."""
        self._holders += 1

    async def drop(self) -> None:
        """The store is not needed any more by one of its holders."""
        self._holders -= 1
        if self._owned and not self._holders:
            await self.store.aclose()

    def reopen(self) -> None:
        """Use a new connection in place of a closed one."""
        self.store = self._open_store()
