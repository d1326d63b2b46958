"""`WatchedGroups`: the exported groups of a process, where a replacement of a group keeps its exported name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from aiocoll.group import open_groups
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.reconfigurer import strip_generation
from aiocoll.group.stats import GroupStats, add_stats, stats_of
from aiocoll.log import logger

__all__ = ["MOST", "WatchedGroups"]

#: Maximum number of exported group names, because a metrics server stores the series of each name forever.
MOST = 100


def _ignore(pg: ProcessGroup, name: str) -> None:
    pass


class WatchedGroups(open_groups.Observer):
    """The exported groups of this process: all open groups, or only added groups and their successors.

    A successor is a group that `shrink`, `grow` or `elastic` makes from another one. Groups with the same name on the
    same rank are exported as one. Its counters include those of closed groups, so they never decrease. Any thread may
    call `stats`.

    Args:
        began: called with each group whose export starts, and its name.
        ended: called with each group whose export stops, and its name.
    """

    def __init__(
        self,
        began: Callable[[ProcessGroup, str], None] = _ignore,
        ended: Callable[[ProcessGroup, str], None] = _ignore,
    ) -> None:
        self._on_start = began
        self._on_stop = ended
        self._lock = threading.RLock()
        #: Exported name of each open group; None for a group that is not exported.
        self._open: WeakKeyDictionary[ProcessGroup, str | None] = WeakKeyDictionary()
        #: Statistics of closed groups, by name and rank.
        self._closed: dict[tuple[str, int], GroupStats] = {}
        self._names: set[str] = set()
        self._exports_all = True
        self._has_warned = False

    def start(self) -> None:
        """Start to observe the groups that this process opens and closes."""
        open_groups.observe(self)

    def close(self) -> None:
        """Stop watching, and stop exporting all groups."""
        open_groups.unobserve(self)
        for pg in list(self._open):
            self.closed(pg)

    def add(self, pg: ProcessGroup, name: str | None) -> None:
        """Export a group and its successors as `name`, or under its own name; end the export of all groups.

        From the first call on, only added groups are exported.

        Raises:
            TypeError: `pg` is not a group, or `name` is not a string.
            RuntimeError: the group has no statistics.
            GroupClosedError: this rank has closed the group.
            ValueError: `MOST` names have been exported already.
        """
        if not isinstance(pg, ProcessGroup):
            raise TypeError(f"pg must be a ProcessGroup, not {type(pg).__name__}")
        pg.stats()  # raises if the group has no statistics
        if parts_of(pg).dispatcher.closed:
            raise parts_of(pg).dispatcher.closed_error()
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a str or None, not {type(name).__name__}")
        if self._exports_all:
            self._exports_all = False
            for each in list(self._open):
                self.remove(each)
            self._names.clear()
        if self._open.get(pg) is not None:
            return
        name = strip_generation(pg.group_name) if name is None else name
        if not self._has_room(name):
            raise ValueError(
                f"pg: {MOST} group names have been exported already, so {name!r} cannot be exported; let short-lived "
                "groups share a name: add(pg, name='workers')"
            )
        self._begin(pg, name)

    def remove(self, pg: ProcessGroup) -> None:
        """Stop exporting a group and its successors; do nothing if it is not exported."""
        with self._lock:
            name = self._open.get(pg)
            if name is None:
                return
            self._open[pg] = None
        self._on_stop(pg, name)

    def stats(self, *, closed: bool = False) -> list[GroupStats]:
        """Return one statistics object per exported name and rank; `closed` includes closed groups."""
        found: dict[tuple[str, int], GroupStats] = {}
        with self._lock:
            for pg, name in list(self._open.items()):
                if name is None or parts_of(pg).comm.runtime.thread == 0:
                    continue  # in a forked child: the group belongs to the parent process
                key = name, pg.rank()
                before = found.get(key, self._closed.get(key))
                stats = replace(stats_of(parts_of(pg).comm), group=name)
                found[key] = stats if before is None else add_stats(before, stats)
            return list(({**self._closed, **found} if closed else found).values())

    # -- callbacks of `open_groups`

    def opened(self, pg: ProcessGroup) -> None:
        """Export a new group if all groups are exported, or if it is the successor of an exported group."""
        first = strip_generation(pg.group_name)
        name = first if self._exports_all else None
        if first != pg.group_name:
            with self._lock:
                before = [name for each, name in self._open.items() if strip_generation(each.group_name) == first]
            if before:
                name = next((each for each in reversed(before) if each is not None), None)
        if name is None or not parts_of(pg).comm.journal.counts:
            with self._lock:
                self._open[pg] = None
        elif self._has_room(name):
            self._begin(pg, name)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "group %r, rank %d: not exported, because %d group names have been exported already; let short-lived "
                "groups share a name: add(pg, name='workers')",
                pg.group_name,
                pg.rank(),
                MOST,
                extra=parts_of(pg).comm.log_extra,
            )

    def closed(self, pg: ProcessGroup) -> None:
        """Stop exporting a closed group; keep its statistics for groups with the same name and rank."""
        with self._lock:
            name = self._open.pop(pg, None)
            if name is None:
                return
            self._keep(pg, name)
        self._on_stop(pg, name)

    def _has_room(self, name: str) -> bool:
        return name in self._names or len(self._names) < MOST

    def _begin(self, pg: ProcessGroup, name: str) -> None:
        with self._lock:
            self._names.add(name)
            self._open[pg] = name
        self._on_start(pg, name)

    def _keep(self, pg: ProcessGroup, name: str) -> None:
        key = name, pg.rank()
        stats = replace(stats_of(parts_of(pg).comm), group=name, pending=0, oldest=0.0)
        stats = replace(stats, peers=tuple(replace(each, missing=0) for each in stats.peers))
        before = self._closed.get(key)
        self._closed[key] = stats if before is None else add_stats(before, stats)
