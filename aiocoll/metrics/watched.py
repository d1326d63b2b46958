"""The groups whose numbers are exported: each from when it is added until this rank closes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.stats import GroupStats

__all__ = ["MOST", "WatchedGroups"]

#: Names that groups may be exported under: each makes series that whoever stores them keeps for ever.
MOST = 100


class WatchedGroups:
    """Groups by name and rank; other threads may ask for their stats at any time.

    Args:
        ended: called with each group that is no longer watched.
    """

    def __init__(self, ended: Callable[[ProcessGroup], None] | None = None) -> None:
        self._groups: dict[tuple[str, int], ProcessGroup] = {}
        self._tells: dict[tuple[str, int], Callable[[], None]] = {}
        self._names: set[str] = set()
        self._ended = ended

    def add(self, pg: ProcessGroup, name: str | None) -> None:
        """Watch a group until this rank closes it, under `name` or its own.

        Raises:
            TypeError: it is none.
            RuntimeError: it does not count.
            GroupClosedError: this rank has closed it.
            ValueError: another one of that name is watched on the same rank, or there have been `MOST` names.
        """
        if not isinstance(pg, ProcessGroup):
            raise TypeError(f"pg must be a ProcessGroup, not {type(pg).__name__}")
        pg.stats()  # raises if it does not count
        if pg._dispatcher.closed:
            raise pg._dispatcher.closed_error()
        if self._key(pg) is not None:
            return
        name = pg.group_name if name is None else name
        if not isinstance(name, str):
            raise TypeError(f"name must be a str or None, not {type(name).__name__}")
        key = name, pg.rank()
        if key in self._groups:
            raise ValueError(
                f"pg: rank {pg.rank()} of a group {name!r} is exported here already: close that group, remove "
                "it here, or give each group a name of its own"
            )
        if name not in self._names and len(self._names) == MOST:
            raise ValueError(
                f"pg: groups of {MOST} names have been exported here, and {name!r} is one more: give groups that come "
                "and go a name that they share, one after the other: add(pg, name='workers')"
            )

        def tell() -> None:
            if pg._dispatcher.closed:
                self.remove(pg)

        self._names.add(name)
        self._groups[key] = pg
        self._tells[key] = tell
        pg._comm.on_revoked.append(tell)

    def remove(self, pg: ProcessGroup) -> None:
        """Watch a group no more; it need not be watched."""
        key = self._key(pg)
        if key is None:
            return
        del self._groups[key]
        tell = self._tells.pop(key)
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
        return [replace(pg.stats(), group=name) for (name, _), pg in list(self._groups.items())]

    def _key(self, pg: ProcessGroup) -> tuple[str, int] | None:
        return next((key for key, known in self._groups.items() if known is pg), None)
