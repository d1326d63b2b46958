"""Launch order of the NCCL calls of several groups on one device, equal on all ranks.

An NCCL call occupies its device until all ranks of its group have launched it. A device may have no room for another
group's call meanwhile. So any two calls must have the same order on all devices that have both, and the orders of
several groups must not form a cycle. While one group uses the device alone, its own order is enough. Otherwise the
ranks of the group agree on a time for each call. This is Skeen's algorithm (K. P. Birman, T. A. Joseph, "Reliable
communication in the presence of failures", ACM TOCS 5 (1), 1987):

    each rank of the group    proposes a time later than all times that its device has seen ->
    rank 0 of the group                                       the latest proposal is the time of the call ->
    each device               starts calls by time, once no other call can get an earlier time

The proposal of a device is a lower bound for the time of the call. The ids of groups order calls with equal times. A
device proposes a time only after all ranks have made the call, and only once all groups on the device use times. So a
proposal never waits for a program, and the first group on a device must first stop launching without times.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

__all__ = ["Lane", "LaunchOrder"]


class LaunchOrder:
    """The launch order of all groups' NCCL calls on one device; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = 0
        self._lanes: list[Lane] = []
        self._entries: list[_Entry] = []
        #: Requests for a logical time, answered once every group on the device uses logical times.
        self._wanted: list[tuple[_Entry, Callable[[int], None]]] = []
        #: The entry whose call is being started; no other call may start meanwhile.
        self._beginning: _Entry | None = None

    @property
    def is_used(self) -> bool:
        """Return whether any group uses the device."""
        return bool(self._lanes)

    def join(self, group: int, crowded: Callable[[], None]) -> Lane:
        """Add a group to the device; return the group's `Lane`.

        Args:
            group: id of the group.
            crowded: called in this loop when another group joins.
        """
        lane = Lane(self, group, crowded)
        with self._lock:
            others = list(self._lanes)
            self._lanes.append(lane)
        for other in others:
            other.call(other.crowded)
        return lane

    # -- for lanes

    def changed(self, change: Callable[[], None] = lambda: None) -> None:
        """Apply `change` under the lock; then answer requests and start calls that the change permits."""
        with self._lock:
            change()
            self._drop_lost()
            wanted: list[tuple[_Entry, Callable[[int], None]]] = []
            if all(lane.is_shared for lane in self._lanes):
                wanted, self._wanted = self._wanted, []
                for entry, _ in wanted:
                    self._clock += 1
                    entry.time = self._clock
                    self._entries.append(entry)
        for entry, reply in wanted:
            entry.lane.call(partial(reply, entry.time))
        self._begin_next()

    def propose(self, entry: _Entry, reply: Callable[[int], None]) -> None:
        """Request a logical time for an entry; `reply` gets the proposal. Call this only inside `changed`."""
        self._wanted.append((entry, reply))

    def settle(self, entry: _Entry, time: int) -> None:
        """Set the final logical time of an entry, at or after its proposal. Call this only inside `changed`."""
        entry.time = time
        self._clock = max(self._clock, time)

    def drop(self, entry: _Entry) -> None:
        """Remove an entry from the order. Call this only inside `changed`, or under the lock."""
        self._wanted = [each for each in self._wanted if each[0] is not entry]
        self._entries = [each for each in self._entries if each is not entry]

    def remove(self, lane: Lane) -> None:
        """Remove a lane and its entries. Call this only inside `changed`, or under the lock."""
        self._lanes = [each for each in self._lanes if each is not lane]
        self._wanted = [each for each in self._wanted if each[0].lane is not lane]
        self._entries = [each for each in self._entries if each.lane is not lane]

    def _drop_lost(self) -> None:
        """Remove lanes whose event loop is closed, because their groups can no longer call `Lane.leave`."""
        for lane in [each for each in self._lanes if each.loop.is_closed()]:
            self.remove(lane)

    def _begin_next(self) -> None:
        while True:
            with self._lock:
                if self._beginning is not None and not self._beginning.lane.loop.is_closed():
                    return
                self._drop_lost()
                first = min(self._entries, key=_Entry.place, default=None)
                if first is None or first.begin is None:
                    return
                self._beginning = first
            if first.lane.is_here():
                self._begin(first)
            elif first.lane.call(partial(self._begin_there, first)):
                return

    def _begin_there(self, entry: _Entry) -> None:
        self._begin(entry)
        self._begin_next()

    def _begin(self, entry: _Entry) -> None:
        """Start a call in its group's event loop, unless the group has left."""
        try:
            if entry in self._entries and entry.begin is not None:
                entry.begin()
        finally:
            with self._lock:
                self.drop(entry)
                self._beginning = None


class _Entry:
    """A call in the launch order with its logical time; the first entry starts once `begin` is set."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.time = 0
        self.begin: Callable[[], None] | None = None

    def place(self) -> tuple[int, int]:
        return self.time, self.lane.group


class Lane:
    """The calls of one group in the launch order of one device, identified by launch numbers.

    Attributes:
        group: id of the group.
        crowded: called in `loop` when another group joins.
        loop: event loop of the group.
        is_shared: whether each call of the group has a time from now on.
    """

    def __init__(self, order: LaunchOrder, group: int, crowded: Callable[[], None]) -> None:
        self.group = group
        self.crowded = crowded
        self.loop = asyncio.get_running_loop()
        self.is_shared = False
        self._order = order
        self._entries: dict[int, _Entry] = {}

    def share(self) -> None:
        """Require a logical time for every call from now on; calls without one are already on the stream."""
        self.is_shared = True
        self._order.changed()

    def propose(self, number: int, reply: Callable[[int], None]) -> None:
        """Request a logical time for a call; `reply` gets the proposal once all groups use logical times."""
        entry = self._entries[number] = _Entry(self)
        self._order.changed(lambda: self._order.propose(entry, reply))

    def settle(self, number: int, time: int) -> None:
        """Set the final logical time of the call `number`."""
        entry = self._entries[number]
        self._order.changed(lambda: self._order.settle(entry, time))

    def begin(self, number: int, begin: Callable[[], None]) -> None:
        """Run `begin` when the call `number`, whose logical time is final, is the first in the launch order."""
        entry = self._entries.pop(number)
        self._order.changed(lambda: setattr(entry, "begin", begin))

    def withdraw(self, number: int) -> None:
        """Remove a call from the launch order."""
        entry = self._entries.pop(number)
        self._order.changed(lambda: self._order.drop(entry))

    def leave(self) -> None:
        """Remove this group from the launch order of the device, because the group has ended."""
        self.is_shared = True
        self._entries.clear()
        self._order.changed(lambda: self._order.remove(self))

    # -- for the order

    def is_here(self) -> bool:
        """Return whether the group's event loop runs in this thread."""
        return asyncio._get_running_loop() is self.loop

    def call(self, call: Callable[[], object]) -> bool:
        """Run a function in the group's event loop, now or soon; return False if the loop is closed."""
        if self.is_here():
            call()
            return True
        try:
            self.loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True
