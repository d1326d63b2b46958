"""`Poll`: the pauses between the polls of a wait, in stores without notifications."""

from __future__ import annotations

from typing import Final

from aiocoll.runtime import Runtime

__all__ = ["Poll"]

#: Seconds between two polls: short at first, since ranks start together, then longer to save CPU time.
_FIRST_PAUSE: Final = 0.001
_LAST_PAUSE: Final = 0.02


class Poll:
    """The pauses between the polls of one wait. They grow, and the last poll is at the deadline."""

    def __init__(self, runtime: Runtime, timeout: float) -> None:
        self._runtime = runtime
        self._deadline = runtime.time() + timeout
        self._seconds = _FIRST_PAUSE

    async def pause(self) -> bool:
        """Sleep until the next poll and return True; return False at once after the deadline."""
        remaining = self._deadline - self._runtime.time()
        if remaining <= 0:
            return False
        await self._runtime.sleep(min(self._seconds, remaining))
        self._seconds = min(2 * self._seconds, _LAST_PAUSE)
        return True
