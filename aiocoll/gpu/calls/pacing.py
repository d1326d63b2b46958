"""Launch limits that rank 0 sets: up to which call the ranks may launch before the comparison.

Ranks launch their calls without keys (`aiocoll.gpu.calls.program_order`) before these are compared
(`aiocoll.gpu.calls.call_comparison`). Calls with keys and messages have no program order. They need one place among the
other calls that is the same on all ranks:

1. Rank 0 halts all ranks. Each rank reports its position.
2. All ranks launch their calls through the farthest of these positions.
3. The placed operation starts. Further calls start as they are confirmed.
4. After `CALM` calls without another placed operation, all ranks launch ahead again.

    rank 0  halt! ->         <- 7            all through 8 ->    number 12 ->    through 9 -> ...     ahead! ->
    rank 1            at 7 ->                launches 8          launches it     launches 9

A rank may reach position 8 only after the placed operation has ended. The operation is then staged, because staging
needs no order.

If other groups use the device of a rank, no rank launches ahead. Once all ranks have reached one position, they share
their devices (`aiocoll.gpu.calls.slots`). The message "through" then becomes "placed": an NCCL call that waits for its
slot.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable

__all__ = ["Pacing"]

#: Maximum seconds for which an operation waits for its position among all calls before it is staged.
MAX_WAIT = 0.02
#: Number of calls without keys after which the ranks again launch before the comparison, provided that no other
#: operation has needed a position in between.
CALM = 64

AHEAD, HALTING, PACED = range(3)


class Pacing:
    """The launch limits of all ranks of a group, which rank 0 sets.

    Args:
        size: number of ranks.
        confirm: sends a confirmed position to all ranks, this one included.
        pace: sends a pace to all ranks, as a numbered operation: "ahead", "halt", "through" or "placed". The other
            arguments are the position of the last two and the confirmed position.
        call_later: calls a function after a number of seconds.
        can_stage: whether operations that wait too long may be staged.
        is_shared: whether other groups use the device of a rank.
    """

    def __init__(
        self,
        size: int,
        confirm: Callable[[int], None],
        pace: Callable[[str, int, int], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
        *,
        can_stage: bool,
        is_shared: bool,
    ) -> None:
        self._size = size
        self._confirm = confirm
        self._pace = pace
        self._call_later = call_later
        self._can_stage = can_stage
        self._state = PACED if is_shared else AHEAD
        self._is_shared = is_shared
        #: Callback of `share`, called when all ranks have launched up to the same position.
        self._shares: Callable[[], None] | None = None
        self._halted: dict[int, int] = {}
        self._confirmed = self._through = self._placed_at = 0
        self._queue: deque[Callable[[bool], None]] = deque()
        self._timer: TimerHandle | None = None
        self._is_short = False

    def confirm(self, position: int) -> None:
        """Record that the calls of all ranks are equal up to `position`, and raise the launch limit."""
        self._confirmed = position
        if self._state != PACED or position <= self._through:
            self._confirm(position)
        else:
            self._admit_up_to(position)
        if self._queue or self._shares is not None:
            self._place_queued()
        is_calm = not (self._queue or self._shares or self._is_shared) and position - self._placed_at >= CALM
        if self._state == PACED and is_calm:
            self._state = AHEAD
            self._pace("ahead", 0, position)

    def place(self, begin: Callable[[bool], None]) -> None:
        """Start an operation at the same position among all calls on every rank.

        Args:
            begin: starts the operation at its place; takes whether it must be staged.
        """
        if self._is_short or (self._is_even and not self._queue):
            self._placed_at = self._confirmed
            begin(self._is_short)
            return
        self._queue.append(begin)
        if self._can_stage and self._timer is None:
            self._timer = self._call_later(MAX_WAIT, self._stage)
        self._halt()

    def share(self, on_shared: Callable[[], None]) -> None:
        """Stop all ranks from launching before the comparison; once they are at one position, call `on_shared`."""
        self._shares = on_shared
        self._halt()
        self._place_queued()

    def _halt(self) -> None:
        if self._state == AHEAD:
            self._state = HALTING
            self._halted.clear()
            self._pace("halt", 0, self._confirmed)

    def on_halt(self, rank: int, position: int) -> None:
        """Record the call position at which `rank` has stopped launching."""
        self._halted[rank] = position
        if self._state == HALTING and len(self._halted) == self._size:
            self._state = PACED
            self._admit_up_to(max(self._confirmed, *self._halted.values()))
            self._place_queued()

    def on_departure(self) -> None:
        """Stage all waiting and all later operations: a rank has left, and NCCL needs all ranks."""
        self._is_short = True
        self._stage()
        self._place_queued()

    def end(self) -> None:
        """Forget all waiting operations, because the group has ended."""
        self._queue.clear()
        self._stop_waiting()

    @property
    def _is_even(self) -> bool:
        """Return whether all ranks have launched the same calls, and launch no call before its comparison."""
        return self._state == PACED and self._confirmed >= self._through

    def _admit_up_to(self, position: int) -> None:
        self._through = position
        self._pace("placed" if self._is_shared else "through", position, self._confirmed)

    def _place_queued(self) -> None:
        while self._queue and self._is_even:
            self._placed_at = self._confirmed
            self._queue.popleft()(False)
        if not self._queue:
            self._stop_waiting()
        if self._shares is not None and (self._is_even or self._is_short):
            on_shared, self._shares, self._is_shared = self._shares, None, True
            on_shared()

    def _stage(self) -> None:
        self._stop_waiting()
        queue, self._queue = self._queue, deque()
        for begin in queue:
            begin(True)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
