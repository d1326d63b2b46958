"""The groups whose numbers are exported, under names that stay the same when a group takes the place of another."""

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

#: Names that groups may be exported under: each makes series that a metrics server stores forever.
MOST = 100


def _ignore(pg: ProcessGroup, name: str) -> None:
    pass


class WatchedGroups(open_groups.Observer):
    """The exported groups of this process: all that are open, or those that were added and their successors.

    A successor is a group that `shrink`, `grow` or `elastic` makes of another one. Groups that have one name on one
    rank are exported as one, whose counters only grow: those of closed groups are part of them. Any thread may ask.

    Args:
        began: called with each group that is exported from now on, and its name.
        ended: called with each group that is exported no more, and its name.
    """

    def __init__(
        self,
        began: Callable[[ProcessGroup, str], None] = _ignore,
        ended: Callable[[ProcessGroup, str], None] = _ignore,
    ) -> None:
        self._began = began
        self._ended = ended
        self._lock = threading.RLock()
        #: Open groups with the names that they are exported under; None for those that are not.
        self._open: WeakKeyDictionary[ProcessGroup, str | None] = WeakKeyDictionary()
        #: Numbers of closed groups, by name and rank.
        self._closed: dict[tuple[str, int], GroupStats] = {}
        self._names: set[str] = set()
        self._exports_all = True
        self._has_warned = False

    def start(self) -> None:
        """Watch all groups of this process."""
        open_groups.observe(self)

    def close(self) -> None:
        """Watch no group any more."""
        open_groups.unobserve(self)
        for pg in list(self._open):
            self.closed(pg)

    def add(self, pg: ProcessGroup, name: str | None) -> None:
        """Export a group and its successors, under `name` or their own; from now on no others but those added.

        Raises:
            TypeError: `pg` is no group, or `name` no text.
            RuntimeError: it does not count.
            GroupClosedError: this rank has closed it.
            ValueError: there have been `MOST` names.
        """
        if not isinstance(pg, ProcessGroup):
            raise TypeError(f"pg must be a ProcessGroup, not {type(pg).__name__}")
        pg.stats()  # raises if it does not count
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
                f"pg: groups of {MOST} names have been exported here, and {name!r} is one more: give groups that come "
                "and go a name that they share: add(pg, name='workers')"
            )
        self._begin(pg, name)

    def remove(self, pg: ProcessGroup) -> None:
        """Export a group and its successors no more; it need not be exported."""
        with self._lock:
            name = self._open.get(pg)
            if name is None:
                return
            self._open[pg] = None
        self._ended(pg, name)

    def stats(self, *, closed: bool = False) -> list[GroupStats]:
        """Return the stats of the exported groups, by name and rank; with `closed`, those of closed groups, too."""
        found: dict[tuple[str, int], GroupStats] = {}
        with self._lock:
            for pg, name in list(self._open.items()):
                if name is None or parts_of(pg).comm.runtime.thread == 0:
                    continue  # a forked child has the groups of its parent, and does nothing in them
                key = name, pg.rank()
                before = found.get(key, self._closed.get(key))
                stats = replace(stats_of(parts_of(pg).comm), group=name)
                found[key] = stats if before is None else add_stats(before, stats)
            return list(({**self._closed, **found} if closed else found).values())

    # -- notifications of `open_groups`

    def opened(self, pg: ProcessGroup) -> None:
        """Export the group if all groups are, or if it is the successor of one that is."""
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
                "group %r, rank %d: not exported, as groups of %d names have been: give groups that come and go a name "
                "that they share, by add(pg, name='workers')",
                pg.group_name,
                pg.rank(),
                MOST,
                extra=parts_of(pg).comm.log_extra,
            )

    def closed(self, pg: ProcessGroup) -> None:
        """Export the group no more, but count its numbers in those of groups with its name and rank."""
        with self._lock:
            name = self._open.pop(pg, None)
            if name is None:
                return
            self._keep(pg, name)
        self._ended(pg, name)

    def _has_room(self, name: str) -> bool:
        return name in self._names or len(self._names) < MOST

    def _begin(self, pg: ProcessGroup, name: str) -> None:
        with self._lock:
            self._names.add(name)
            self._open[pg] = name
        self._began(pg, name)

    def _keep(self, pg: ProcessGroup, name: str) -> None:
        key = name, pg.rank()
        stats = replace(stats_of(parts_of(pg).comm), group=name, pending=0, oldest=0.0)
        stats = replace(stats, peers=tuple(replace(each, missing=0) for each in stats.peers))
        before = self._closed.get(key)
        self._closed[key] = stats if before is None else add_stats(before, stats)
