"""`Turns`: a queue per device, so that groups create their NCCL communicators one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Turn", "Turns"]


class Turns:
    """The queue of groups that create their NCCL communicators on one device; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Queued turns; the first one is current.
        self._row: deque[Turn] = deque()

    def take(self, call: Callable[[], None]) -> Turn:
        """Queue a turn, and run `call` in this event loop when all earlier turns have ended."""
        turn = Turn(self, call)
        with self._lock:
            had_it = self._row[0] if self._row else None
            # Drop turns whose event loop is closed, because such turns would never end.
            self._row = deque(each for each in (*self._row, turn) if not each.is_lost())
            first = self._row[0]
        if first is not had_it:
            first.begin()
        return turn

    def end(self, turn: Turn) -> None:
        """Remove a turn from the queue; if the turn was current, start the next one."""
        with self._lock:
            if turn not in self._row:
                return
            had_it = self._row[0] is turn
            self._row.remove(turn)
            following = self._row[0] if had_it and self._row else None
        if following is not None:
            following.begin()


class Turn:
    """The turn of one group to create its NCCL communicator on a device."""

    def __init__(self, turns: Turns, call: Callable[[], None]) -> None:
        self._turns = turns
        self._call: Callable[[], None] | None = call
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Start this turn: run the group's callback in the group's event loop."""
        try:
            self._loop.call_soon_threadsafe(self._on_begin)
        except RuntimeError:  # the event loop is closed, and its groups with it
            self.end()

    def is_lost(self) -> bool:
        """Return whether the group's event loop is closed, so that the turn would never end."""
        return self._loop.is_closed()

    def end(self) -> None:
        """End this turn; do nothing if it has ended already."""
        self._call = None
        self._turns.end(self)

    def _on_begin(self) -> None:
        if self._call is not None:
            self._call()
