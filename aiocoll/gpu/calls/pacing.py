"""As rank 0: how far ranks may launch their calls before all are known to have made them alike.

Ranks launch their calls without keys (`aiocoll.gpu.calls.program_order`) ahead of their comparison
(`aiocoll.gpu.calls.call_comparison`). What has another order, calls with keys and messages, needs one place among them
that is the same on all ranks: first rank 0 halts all ranks, each of which says how far it has come; then all launch
through the farthest of these positions; then comes what has to be placed, and calls go on as they are confirmed. After
a while without any such thing, all launch ahead again.

    rank 0  halt! ->         <- 7            all through 8 ->    number 12 ->    through 9 -> ...     ahead! ->
    rank 1            at 7 ->                launches 8          launches it     launches 9

A program may let a rank come to position 8 only when the other thing is done: then that is staged, which needs no
order.

If other groups use the device of a rank, none launches ahead any more: once all have come to one place, they share
their devices (`aiocoll.gpu.calls.slots`), and "through" becomes "placed": a call of NCCL that waits for its slot.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable

__all__ = ["Pacing"]

#: Seconds that something waits for its place before it is staged.
PATIENCE = 0.02
#: Calls without keys after which ranks launch ahead again, if there was nothing else.
CALM = 64

AHEAD, HALTING, PACED = range(3)


class Pacing:
    """How far the ranks of a group may launch.

    Args:
        size: number of ranks.
        confirm: tells all ranks, this one included, that a position is confirmed.
        pace: tells all ranks, in the order of all numbers, "ahead", "halt", or "through" or "placed" with a position;
            with that goes the confirmed one.
        call_later: calls after so many seconds.
        can_stage: what waits too long may be staged.
        is_shared: other groups use the device of a rank.
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
        #: What tells all ranks to share, once they are at one place.
        self._shares: Callable[[], None] | None = None
        self._halted: dict[int, int] = {}
        self._confirmed = self._through = self._placed_at = 0
        self._queue: deque[Callable[[bool], None]] = deque()
        self._timer: TimerHandle | None = None
        self._is_short = False

    def confirm(self, position: int) -> None:
        """All ranks have called the same up to a position."""
        self._confirmed = position
        if self._state != PACED or position <= self._through:
            self._confirm(position)
        else:
            self._let_through(position)
        if self._queue or self._shares is not None:
            self._place_all()
        is_calm = not (self._queue or self._shares or self._is_shared) and position - self._placed_at >= CALM
        if self._state == PACED and is_calm:
            self._state = AHEAD
            self._pace("ahead", 0, position)

    def place(self, begin: Callable[[bool], None]) -> None:
        """Give something its place among all calls.

        Args:
            begin: called in its turn; with True if it has to be staged.
        """
        if self._is_short or (self._is_even and not self._queue):
            self._placed_at = self._confirmed
            begin(self._is_short)
            return
        self._queue.append(begin)
        if self._can_stage and self._timer is None:
            self._timer = self._call_later(PATIENCE, self._stage)
        self._halt()

    def share(self, tell: Callable[[], None]) -> None:
        """Let no rank launch ahead any more; call `tell` when they have come to one place."""
        self._shares = tell
        self._halt()
        self._place_all()

    def _halt(self) -> None:
        if self._state == AHEAD:
            self._state = HALTING
            self._halted.clear()
            self._pace("halt", 0, self._confirmed)

    def halted(self, rank: int, position: int) -> None:
        """A rank has halted behind a position."""
        self._halted[rank] = position
        if self._state == HALTING and len(self._halted) == self._size:
            self._state = PACED
            self._let_through(max(self._confirmed, *self._halted.values()))
            self._place_all()

    def departed(self) -> None:
        """A rank has left: NCCL can do nothing more in this group."""
        self._is_short = True
        self._stage()
        self._place_all()

    def end(self) -> None:
        """The group has ended."""
        self._queue.clear()
        self._stop_waiting()

    @property
    def _is_even(self) -> bool:
        """Whether all ranks have called what any of them has launched, and launch no more."""
        return self._state == PACED and self._confirmed >= self._through

    def _let_through(self, position: int) -> None:
        self._through = position
        self._pace("placed" if self._is_shared else "through", position, self._confirmed)

    def _place_all(self) -> None:
        while self._queue and self._is_even:
            self._placed_at = self._confirmed
            self._queue.popleft()(False)
        if not self._queue:
            self._stop_waiting()
        if self._shares is not None and (self._is_even or self._is_short):
            tell, self._shares, self._is_shared = self._shares, None, True
            tell()

    def _stage(self) -> None:
        self._stop_waiting()
        queue, self._queue = self._queue, deque()
        for begin in queue:
            begin(True)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
