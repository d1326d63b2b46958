"""Which kernels of NCCL a fake device has room for: those of one communicator at a time.

A real device may run several at once, or not: that depends on what else it does, and on how many blocks NCCL uses. So a
kernel waits here until those of other communicators have ended, on whatever streams they are. Who launches in an order
that is not the same on all devices deadlocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .streams import Blocked


class Room:
    """The room of one device.

    Attributes:
        owner: the communicator whose kernels run; None if there are none.
    """

    def __init__(self) -> None:
        self.owner: object = None
        self._running = 0
        self._lock = threading.Lock()
        self._waiting: list[threading.Event] = []

    def enter(self, owner: object, is_over: Callable[[], bool], blocked: Blocked) -> None:
        """Wait until there is room for a kernel of `owner`, or until that is over."""
        while True:
            with self._lock:
                if self.owner in (None, owner) or is_over() or blocked.over:
                    self.owner = owner
                    self._running += 1
                    return
                changed = threading.Event()
                self._waiting.append(changed)
            blocked.wait(changed)

    def wait_until_free(self, blocked: Blocked) -> bool:
        """Wait until no kernel of NCCL runs; return whether one did."""
        waited = False
        while True:
            with self._lock:
                if self.owner is None or blocked.over:
                    return waited
                waited = True
                changed = threading.Event()
                self._waiting.append(changed)
            blocked.wait(changed)

    def leave(self) -> None:
        """Handle the end of a kernel."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self.owner = None
        self.changed()

    def changed(self) -> None:
        """Let all that wait look again."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.set()
