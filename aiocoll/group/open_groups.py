"""The open groups of this process, and observers of them, such as exporters of metrics."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Final
from weakref import WeakSet

__all__ = ["Observer", "add", "discard", "observe", "unobserve"]


class Observer(ABC):
    """An object that is notified when this rank makes or closes a group, on the event loop of that group."""

    @abstractmethod
    def opened(self, group: Any) -> None:
        """Note that this rank has made a `ProcessGroup`."""

    @abstractmethod
    def closed(self, group: Any) -> None:
        """Note that this rank closes it, and that its works have ended."""


#: Weak: neither this table nor an observer keeps a group alive that the program has dropped.
_groups: Final[WeakSet[Any]] = WeakSet()
_observers: Final[WeakSet[Observer]] = WeakSet()
#: Reentrant: a signal handler of the program may run while it is held.
_lock: Final = threading.RLock()


def add(group: Any) -> None:
    """Add a group that this rank has made."""
    with _lock:
        _groups.add(group)
        for observer in list(_observers):
            observer.opened(group)


def discard(group: Any) -> None:
    """Remove a group that this rank closes."""
    with _lock:
        _groups.discard(group)
        for observer in list(_observers):
            observer.closed(group)


def observe(observer: Observer) -> None:
    """Notify `observer`, which is held weakly: now of each group that is open, and later of changes."""
    with _lock:
        _observers.add(observer)
        for group in list(_groups):
            observer.opened(group)


def unobserve(observer: Observer) -> None:
    """Notify `observer` no more."""
    with _lock:
        _observers.discard(observer)
