"""The groups whose numbers are exported: each from when it is added until this rank closes it."""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.stats import GroupStats

__all__ = ["WatchedGroups"]


class WatchedGroups:
    """Groups by name and rank; other threads may ask for their stats at any time.

    Args:
        ended: called with each group that is no longer watched.
    """

    def __init__(self, ended: Callable[[ProcessGroup], None] | None = None) -> None:
        self._groups: dict[tuple[str, int], ProcessGroup] = {}
        self._tells: dict[tuple[str, int], Callable[[], None]] = {}
        self._ended = ended

    def add(self, pg: ProcessGroup) -> None:
        """Watch a group until this rank closes it.

        Raises:
            TypeError: it is none.
            RuntimeError: it does not count.
            GroupClosedError: this rank has closed it.
            ValueError: another one of its name is watched on the same rank.
        """
        if not isinstance(pg, ProcessGroup):
            raise TypeError(f"pg must be a ProcessGroup, not {type(pg).__name__}")
        pg.stats()  # raises if it does not count
        if pg._dispatcher.closed:
            raise pg._dispatcher.closed_error()
        name = pg.group_name, pg.rank()
        known = self._groups.get(name)
        if known is pg:
            return
        if known is not None:
            raise ValueError(
                f"pg: rank {pg.rank()} of a group {pg.group_name!r} is exported here already: close that group, remove "
                "it here, or give each group a name of its own"
            )

        def tell() -> None:
            if pg._dispatcher.closed:
                self.remove(pg)

        self._groups[name] = pg
        self._tells[name] = tell
        pg._comm.on_revoked.append(tell)

    def remove(self, pg: ProcessGroup) -> None:
        """Watch a group no more; it need not be watched."""
        name = pg.group_name, pg.rank()
        if self._groups.get(name) is not pg:
            return
        del self._groups[name]
        tell = self._tells.pop(name)
        # Later, if this is one of the calls of that list.
        pg._comm.runtime.call_soon(pg._comm.on_revoked.remove, tell)
        if self._ended is not None:
            self._ended(pg)

    def clear(self) -> None:
        """Watch no group any more."""
        for pg in list(self._groups.values()):
            self.remove(pg)

    def stats(self) -> list[GroupStats]:
        """Return the stats of all groups."""
        return [pg.stats() for pg in list(self._groups.values())]
