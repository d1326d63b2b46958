"""The open groups of this process, and their observers, such as metrics exporters."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Final
from weakref import WeakSet

__all__ = ["Observer", "add", "discard", "observe", "unobserve"]


class Observer(ABC):
    """An observer of open groups; it is notified in the event loop of a group that this rank makes or closes."""

    @abstractmethod
    def opened(self, group: Any) -> None:
        """Handle a `ProcessGroup` that this rank has made."""

    @abstractmethod
    def closed(self, group: Any) -> None:
        """Handle a group that this rank closes; its works have ended."""


#: Weak references: this table and its observers must not keep a dropped group alive.
_groups: Final[WeakSet[Any]] = WeakSet()
_observers: Final[WeakSet[Observer]] = WeakSet()
#: Reentrant: a signal handler of the program may run in the thread that holds the lock.
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
    """Notify `observer` of all open groups now, and of later changes; a weak reference is kept."""
    with _lock:
        _observers.add(observer)
        for group in list(_groups):
            observer.opened(group)


def unobserve(observer: Observer) -> None:
    """Stop notifying `observer`."""
    with _lock:
        _observers.discard(observer)
