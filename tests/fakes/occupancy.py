"""Occupancy of a fake device: it runs NCCL kernels of only one communicator at a time.

A real device may run kernels of several communicators at once, depending on its load and on the blocks that NCCL uses.
The fake assumes the worst case: a kernel waits until those of other communicators have ended, on all streams. So ranks
deadlock if they launch in different orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .streams import Blocked


class Room:
    """A lock on one fake device that all NCCL kernels of one communicator can hold together.

    Attributes:
        owner: the communicator whose kernels run; None if no kernel runs.
    """

    def __init__(self) -> None:
        self.owner: object = None
        self._running = 0
        self._lock = threading.Lock()
        self._waiting: list[threading.Event] = []

    def enter(self, owner: object, has_ended: Callable[[], bool], blocked: Blocked) -> None:
        """Wait until kernels of communicator `owner` may run, or until `has_ended` returns True."""
        while True:
            with self._lock:
                if self.owner in (None, owner) or has_ended() or blocked.is_closed:
                    self.owner = owner
                    self._running += 1
                    return
                changed = threading.Event()
                self._waiting.append(changed)
            blocked.wait(changed)

    def wait_until_free(self, blocked: Blocked) -> bool:
        """Wait until no NCCL kernel runs on the device; return whether the caller had to wait."""
        waited = False
        while True:
            with self._lock:
                if self.owner is None or blocked.is_closed:
                    return waited
                waited = True
                changed = threading.Event()
                self._waiting.append(changed)
            blocked.wait(changed)

    def leave(self) -> None:
        """Record the end of a kernel; after the last one, other communicators may run kernels."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self.owner = None
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiting threads, so that each checks again whether its kernel may run."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.set()
