"""Rank 0's comparison of the calls without keys that the ranks have launched."""

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
        #: For each other rank: reports (position, hash) about calls that rank 0 has not made yet, and the last position
        #: up to which the rank's calls equal rank 0's calls.
        self._reports: dict[int, deque[tuple[int, int]]] = {rank: deque() for rank in range(1, size)}
        self._equal = dict.fromkeys(range(1, size), 0)
        self._confirmed = 0
        self._is_over = False

    def reported(self, rank: int, position: int, found: int) -> None:
        """Record a report of another rank: the position of its last call, and the hash of all calls up to it.

        Raises:
            ValueError: the rank reported this position or a later one before.
        """
        reports = self._reports[rank]
        if position <= (reports[-1][0] if reports else self._equal[rank]):
            raise ValueError(f"rank {rank} has already reported position {position} of its calls, or a later one")
        reports.append((position, found))
        self.compare_reports()

    def compare_reports(self) -> None:
        """Compare reported hashes with rank 0's own; confirm the last position at which all ranks agree."""
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
        """Return whether `rank` has reported that it has made its call at `position`."""
        reports = self._reports[rank]
        return position <= (reports[-1][0] if reports else self._equal[rank])

    def end(self) -> None:
        """Stop the comparison, because the group has ended."""
        self._is_over = True
        self.pacing.end()
