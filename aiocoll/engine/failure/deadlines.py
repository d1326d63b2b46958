"""The one timer of an endpoint: finds operations that have waited long, without costing those that do not."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

from aiocoll.engine.operations.base import P2P, Operation
from aiocoll.engine.operations.differences import called
from aiocoll.log import logger

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["REPORT_AFTER", "Deadlines"]


#: Seconds after which a pending operation is reported to the coordinator (contract: 250 ms); also the timer's period.
REPORT_AFTER = 0.25
#: Operations looked at in a tick, oldest first: with equal timeouts the oldest is the first to expire.
LOOKED_AT = 64


class Deadlines:
    """Deadlines, reports and warnings of all operations of one endpoint.

    Attributes:
        timer: of the next tick; None while there is nothing to look at.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.timer: asyncio.TimerHandle | None = None
        #: When it goes off; uvloop's timers of less than a millisecond do not tell.
        self._due = 0.0
        # Operations whose timeout is not the group's: these may expire before older ones.
        self._hurried: dict[Operation, None] = {}

    def entered(self, operation: Operation) -> None:
        """Keep an eye on `operation`; while there is a timer, usual timeouts need no word."""
        if operation.timeout != operation.comm.default_timeout:
            self._hurried[operation] = None
            self._arm(_patience(operation))
        elif self.timer is None:
            self._arm(REPORT_AFTER)

    def ended(self, operation: Operation) -> None:
        """Forget `operation`, lest its buffers live until the next tick."""
        self._hurried.pop(operation, None)

    def close(self) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _arm(self, delay: float) -> None:
        """Tick in `delay` seconds, if not sooner anyway."""
        due = self._endpoint.runtime.time() + delay
        if self.timer is not None:
            if delay >= REPORT_AFTER or self._due <= due:
                return
            self.timer.cancel()
        self._due = due
        self.timer = self._endpoint.runtime.call_later(delay, self._tick)

    def _tick(self) -> None:
        self.timer = None
        now = self._endpoint.runtime.time()
        delay = REPORT_AFTER
        for operation in list(self._hurried):
            if operation.done:
                self.ended(operation)
                continue
            left = operation.entered + operation.timeout - now
            if left <= 0:
                del self._hurried[operation]
                operation.comm.attempt(operation.expire)
            else:
                operation.comm.attempt(self._look, operation, now, True)
                delay = min(delay, left, max(0.0, _due(operation) - now))
        busy = bool(self._hurried)
        waits = False
        for group in list(self._endpoint.groups.values()):
            oldest = True
            # Collectives also on their own: any number of receives may have been pending for longer.
            pending = dict.fromkeys(islice(group.pending, LOOKED_AT))
            pending.update(dict.fromkeys(islice(group.operations.values(), LOOKED_AT)))
            for operation in pending:
                busy = True
                waits = waits or now - operation.entered >= REPORT_AFTER
                group.attempt(self._look, operation, now, oldest)
                # Receives may wait for as long as they like, and are not reported.
                oldest = oldest and operation.id & P2P == P2P
        if waits:
            self._endpoint.failure_detector.needed()
        if busy:
            self._arm(delay)

    def _look(self, operation: Operation, now: float, oldest: bool) -> None:
        """Do what is due; of those that have been reported only the `oldest` is again."""
        if operation.done:
            return
        age = now - operation.entered
        if age >= operation.timeout:
            operation.expire()
            return
        stalls = operation.comm.stalls
        if now >= _due(operation) and (oldest or not operation.reported or stalls.unanswered(operation)):
            operation.reported = stalls.report(operation)
            operation.seek()
        if age >= operation.comm.warn_after and not operation.warned:
            operation.warned = True
            _, detail = stalls.missing(operation)
            logger.warning(
                "group %r, rank %d: %s, called as %s, has been waiting for %.1f s: %s",
                operation.comm.name,
                operation.comm.rank,
                operation.title(),
                called(operation.describe()),
                age,
                detail,
                extra=operation.comm.log_extra,
            )


def _patience(operation: Operation) -> float:
    """Seconds until the first report: in half the time of a short timeout there is time for an answer."""
    return min(REPORT_AFTER, operation.timeout / 2)


def _due(operation: Operation) -> float:
    """Return when `operation` is to be reported."""
    return operation.reported or operation.entered + _patience(operation)
