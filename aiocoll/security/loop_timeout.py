"""Timeouts for peers that have not proven the job key yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiocoll.runtime import Runtime

__all__ = ["LoopTimeout", "loop_timeout"]

#: Minimum number of loop iterations: twice as many as an encrypted handshake between ranks of one loop takes.
_TURNS = 32
#: Maximum number of extensions of the timeout, and the seconds of each. The timeout is extended while a message has
#: arrived that is not read yet. A peer without the key sends three messages: a TLS message, HELLO and PROOF.
_LAST_LOOKS = 3
_LOOK_AGAIN = 0.1
#: Minimum delay in seconds by which a late timer shows that the loop was blocked. Shorter delays are normal on a loaded
#: host.
_BLOCKED = 0.1


class LoopTimeout:
    """A timeout that also requires 32 loop iterations, and first lets the loop read a message that has arrived.

    An iteration may take longer than the timeout of a handshake: if the loop is blocked, or if many ranks of one loop
    connect at the same time. By the clock alone, each attempt would end after its first step, and none would succeed.

    Args:
        runtime: clock and timers.
        seconds: the timeout; with `inf` it never expires.
        on_timeout: callback that runs when the timeout expires.
        arrived: returns whether a message waits that the handshake has not read.

    Attributes:
        blocked: seconds for which the loop was blocked during the timeout.
    """

    __slots__ = ("_arrived", "_due", "_left", "_over", "_part", "_runtime", "_timer", "blocked")

    def __init__(
        self,
        runtime: Runtime,
        seconds: float,
        on_timeout: Callable[[], object],
        arrived: Callable[[], bool] = lambda: False,
    ) -> None:
        self.blocked = 0.0
        self._runtime = runtime
        self._part = seconds / _TURNS
        self._over = on_timeout
        self._arrived = arrived
        self._left = _TURNS
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        if seconds != float("inf"):
            self._wait(self._part)

    def cancel(self) -> None:
        """Stop the timeout. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        self._due = self._runtime.stamp() + seconds
        self._timer = self._runtime.call_later(seconds, self._turn)

    def _turn(self) -> None:
        self._left -= 1
        if (late := self._runtime.stamp() - self._due) > _BLOCKED:
            self.blocked += late
        if self._left > 0:
            self._wait(self._part)
        elif self._left > -_LAST_LOOKS and self._arrived():
            self._wait(min(self._part, _LOOK_AGAIN))
        else:
            self._over()


@asynccontextmanager
async def loop_timeout(runtime: Runtime, seconds: float, arrived: Callable[[], bool]) -> AsyncIterator[None]:
    """Raise `TimeoutError` in this ``async with`` block when a `LoopTimeout` with these arguments expires."""
    async with asyncio.timeout(None) as limit:
        timeout = LoopTimeout(runtime, seconds, lambda: limit.reschedule(runtime.time()), arrived)
        try:
            yield
        finally:
            timeout.cancel()
