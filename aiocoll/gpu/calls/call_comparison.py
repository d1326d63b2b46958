"""Comparison by rank 0 of the calls without keys that all ranks have made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from aiocoll.gpu.calls.pacing import Pacing
from aiocoll.gpu.calls.program_order import ProgramOrder

__all__ = ["CallComparison"]


class CallComparison:
    """The comparison of other ranks' reported calls with the calls of rank 0.

    Args:
        size: number of ranks.
        order: rank 0's own calls.
        pacing: gets each position up to which the calls of all ranks are equal.
        compare: sends hashes, from a position on, to a rank, which finds the first difference.

    Attributes:
        pacing: as given.
    """

    def __init__(
        self, size: int, order: ProgramOrder, pacing: Pacing, compare: Callable[[int, int, Sequence[int]], None]
    ) -> None:
        self.pacing = pacing
        self._order = order
        self._compare = compare
        #: By rank: the reported positions and hashes that rank 0 has not reached yet; and the last equal position.
        self._reports: dict[int, deque[tuple[int, int]]] = {rank: deque() for rank in range(1, size)}
        self._equal = dict.fromkeys(range(1, size), 0)
        self._confirmed = 0
        self._is_over = False

    def reported(self, rank: int, position: int, found: int) -> None:
        """Record the last position that a rank has reported, and the hash of its calls up to there.

        Raises:
            ValueError: the rank reported this position or a later one before.
        """
        reports = self._reports[rank]
        if position <= (reports[-1][0] if reports else self._equal[rank]):
            raise ValueError(f"rank {rank} has already reported position {position}")
        reports.append((position, found))
        self.compare_reports()

    def compare_reports(self) -> None:
        """Compare the reports up to rank 0's position, and confirm the last position that is equal on all ranks."""
        order = self._order
        for rank, reports in self._reports.items():
            while reports and reports[0][0] <= order.called and not self._is_over:
                position, found = reports.popleft()
                start = self._equal[rank] + 1
                mine = order.hashes(start, position)
                if mine[-1] != found:
                    self._is_over = True
                    self._compare(rank, start, mine)
                    return
                self._equal[rank] = position
        position = min((order.called, *self._equal.values()))
        if position > self._confirmed and not self._is_over:
            self._confirmed = position
            self.pacing.confirm(position)

    def has_called(self, rank: int, position: int) -> bool:
        """Return whether another rank has reported its call at this position."""
        reports = self._reports[rank]
        return position <= (reports[-1][0] if reports else self._equal[rank])

    def end(self) -> None:
        """Stop the comparison, because the group has ended."""
        self._is_over = True
        self.pacing.end()
