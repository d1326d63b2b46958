"""The open groups of this process, and objects that observe them, such as metrics exporters."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Final
from weakref import WeakSet

__all__ = ["Observer", "add", "discard", "observe", "unobserve"]


class Observer(ABC):
    """An observer of open groups. It is notified, in a group's event loop, when this rank makes or closes the group."""

    @abstractmethod
    def opened(self, group: Any) -> None:
        """Handle a new `ProcessGroup` of this rank."""

    @abstractmethod
    def closed(self, group: Any) -> None:
        """Handle a group that this rank is closing. Its works have ended."""


#: Weak references, so that a group that the program has dropped is not kept alive.
_groups: Final[WeakSet[Any]] = WeakSet()
_observers: Final[WeakSet[Observer]] = WeakSet()
#: Reentrant, because a signal handler of the program may run in the thread that holds the lock.
_lock: Final = threading.RLock()


def add(group: Any) -> None:
    """Record that this rank has made a group, and notify the observers."""
    with _lock:
        _groups.add(group)
        for observer in list(_observers):
            observer.opened(group)


def discard(group: Any) -> None:
    """Record that this rank closes a group, and notify the observers."""
    with _lock:
        _groups.discard(group)
        for observer in list(_observers):
            observer.closed(group)


def observe(observer: Observer) -> None:
    """Notify `observer` of all open groups now, and of later changes. Only a weak reference to it is kept."""
    with _lock:
        _observers.add(observer)
        for group in list(_groups):
            observer.opened(group)


def unobserve(observer: Observer) -> None:
    """Stop notifying `observer`."""
    with _lock:
        _observers.discard(observer)
