"""A limit of time for what takes several turns of the loop, which a loop that is busy does not use up."""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.runtime import Runtime

__all__ = ["Patience"]

#: Turns of the loop that there are at least: twice what a handshake takes under encryption, between ranks of one loop.
_TURNS = 32


class Patience:
    """Calls `over` after so many seconds, and so many turns of the loop, unless it is cancelled before.

    Where ranks share a loop and all connect at once, or where something blocks it, one turn may take longer than a
    handshake may. By the clock alone each attempt would end after its first step, and be begun again, for ever.

    Args:
        runtime: clock and timers.
        seconds: for how long.
        over: what to call.
    """

    __slots__ = ("_left", "_over", "_part", "_runtime", "_timer")

    def __init__(self, runtime: Runtime, seconds: float, over: Callable[[], object]) -> None:
        self._runtime = runtime
        self._part = seconds / _TURNS
        self._over = over
        self._left = _TURNS
        self._timer = runtime.call_later(self._part, self._turn)

    def cancel(self) -> None:
        """Do not call."""
        self._timer.cancel()

    def _turn(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._runtime.call_later(self._part, self._turn)
        else:
            self._over()
