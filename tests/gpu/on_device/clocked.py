"""A wrapper of NCCL that records when each rank last launched an allreduce."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from .delegate import Delegate


class Clocked(Delegate):
    """A wrapper of an NCCL library whose communicators record the allreduce times.

    Attributes:
        last: by rank, the time of its last allreduce, in seconds of `perf_counter`.
    """

    def __init__(self, nccl: Any) -> None:
        super().__init__(nccl)
        self.last: dict[int, float] = {}

    def init(self, world_size: int, unique_id: bytes, rank: int) -> Any:
        return ClockedEnd(self._other.init(world_size, unique_id, rank), self.last, rank)


class ClockedEnd(Delegate):
    """A wrapper of one rank's communicator that records when it launches an allreduce."""

    def __init__(self, end: Any, last: dict[int, float], rank: int) -> None:
        super().__init__(end)
        self._last, self._rank = last, rank
        self._all_reduce = end.all_reduce

    def all_reduce(self, *args: Any) -> None:
        self._last[self._rank] = perf_counter()
        self._all_reduce(*args)
