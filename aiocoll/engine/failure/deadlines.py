"""Deadlines of pending operations: one timer per endpoint, at no cost for operations that complete early."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import P2P
from aiocoll.runtime import Runtime

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["REPORT_AFTER", "Deadlines"]

#: Seconds after which a pending operation is reported to the coordinator (documented: 250 ms). Also the timer's period.
REPORT_AFTER = 0.25
#: Maximum number of operations that one timer tick examines, oldest first. With equal timeouts, the oldest operation
#: expires first.
LOOKED_AT = 64


class Deadlines:
    """The deadlines, stall reports and warnings of all operations of one endpoint.

    Args:
        runtime: clock and timers.
        groups: the endpoint's groups, by id.
        needed: callback that runs when an operation waits for other ranks.

    Attributes:
        armed: whether a timer for the next tick runs; False while no operation is pending. It is an array, so that
            native code can read it.
    """

    def __init__(self, runtime: Runtime, groups: Mapping[int, Communicator], needed: Callable[[], None]) -> None:
        self._runtime = runtime
        self._groups = groups
        self._needed = needed
        self.armed = array("b", [False])
        self._timer: asyncio.TimerHandle | None = None
        #: The time of the next tick. It is stored here, because uvloop's timers of less than a millisecond cannot
        #: report their time.
        self._due = 0.0
        # Operations with a timeout other than the default: they may expire before older operations.
        self._own_timeouts: dict[Operation, Communicator] = {}

    @property
    def least_timeout(self) -> float:
        """Return the shortest timeout, in seconds, for which `entered` may be called one timer tick late."""
        return 2 * REPORT_AFTER

    def entered(self, group: Communicator, operation: Operation) -> None:
        """Watch `operation` of `group`. For the default timeout, this call is needed only while no timer runs."""
        if operation.timeout != group.default_timeout:
            self._own_timeouts[operation] = group
            self._schedule_tick(_report_delay(operation))
        elif not self.armed[0]:
            self.start()

    def start(self) -> None:
        """Start the periodic timer, which examines all operations."""
        self._schedule_tick(REPORT_AFTER)

    def ended(self, operation: Operation) -> None:
        """Stop watching `operation`, so that its buffers are not kept until the next tick."""
        self._own_timeouts.pop(operation, None)

    def close(self) -> None:
        """Stop the timer."""
        self.armed[0] = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_tick(self, delay: float) -> None:
        """Schedule the next timer tick in at most `delay` seconds."""
        due = self._runtime.time() + delay
        if self._timer is not None:
            if delay >= REPORT_AFTER or self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self.armed[0] = True
        self._timer = self._runtime.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.armed[0] = False
        now = self._runtime.time()
        delay = REPORT_AFTER
        for operation, group in list(self._own_timeouts.items()):
            if operation.done:
                self.ended(operation)
                continue
            left = operation.entered + operation.timeout - now
            if left <= 0:
                del self._own_timeouts[operation]
                group.attempt(operation.expire)
            else:
                group.attempt(self._check, group, operation, now, True)
                delay = min(delay, left, max(0.0, _due(operation) - now))
        busy = bool(self._own_timeouts)
        waits = False
        for group in list(self._groups.values()):
            oldest = True
            # Collectives have a limit of their own, because any number of older receives may be pending.
            pending = dict.fromkeys(islice(group.in_flight.pending, LOOKED_AT))
            pending.update(dict.fromkeys(islice(group.in_flight.collectives(), LOOKED_AT)))
            for operation in pending:
                busy = True
                waits = waits or now - operation.entered >= REPORT_AFTER
                group.attempt(self._check, group, operation, now, oldest)
                # Sends and receives are not reported, because receives may wait without limit. So the next operation
                # may count as the oldest.
                oldest = oldest and operation.id & P2P == P2P
        if waits:
            self._needed()
        if busy:
            self._schedule_tick(delay)

    def _check(self, group: Communicator, operation: Operation, now: float, oldest: bool) -> None:
        """Fail an expired operation, or report or warn about it. Only the `oldest` operation is reported repeatedly."""
        if operation.done:
            return
        age = now - operation.entered
        if age >= operation.timeout:
            operation.expire()
            return
        stalls = group.stalls
        if now >= _due(operation) and (oldest or not operation.reported or stalls.is_unanswered(operation)):
            operation.reported = stalls.report(operation)
            operation.seek()
        if age >= group.warn_after and not operation.warned:
            operation.warned = True
            stalls.warn(operation, age)


def _report_delay(operation: Operation) -> float:
    """Return the seconds until an operation's first stall report: half of a short timeout, so a reply can arrive."""
    return min(REPORT_AFTER, operation.timeout / 2)


def _due(operation: Operation) -> float:
    """Return the time at which the next stall report of `operation` is due."""
    return operation.reported or operation.entered + _report_delay(operation)
