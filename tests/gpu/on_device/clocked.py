"""NCCL that knows when it was called last: whether a call has been launched, and when."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from .through import Through


class Clocked(Through):
    """NCCL, whichever it is.

    Attributes:
        last: by rank, when it has last called for an allreduce, in seconds of `perf_counter`.
    """

    def __init__(self, nccl: Any) -> None:
        super().__init__(nccl)
        self.last: dict[int, float] = {}

    def init(self, world_size: int, unique_id: bytes, rank: int) -> Any:
        return ClockedEnd(self._other.init(world_size, unique_id, rank), self.last, rank)


class ClockedEnd(Through):
    """One rank's end of a communicator."""

    def __init__(self, end: Any, last: dict[int, float], rank: int) -> None:
        super().__init__(end)
        self._last, self._rank = last, rank
        self._all_reduce = end.all_reduce

    def all_reduce(self, *args: Any) -> None:
        self._last[self._rank] = perf_counter()
        self._all_reduce(*args)
