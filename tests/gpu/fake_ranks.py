"""Ranks for tests of the fake NCCL: threads, each with a device and a stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeCommunicator, FakeNccl


class Rank:
    """A rank of a fake NCCL communicator, which belongs to the thread that creates the rank."""

    def __init__(self, nccl: FakeNccl, unique_id: bytes, rank: int, world_size: int) -> None:
        self.nccl, self.cuda, self.rank, self.world_size = nccl, nccl.cuda, rank, world_size
        self.cuda.use(rank)
        self.stream = self.cuda.stream_create()
        self.communicator: FakeCommunicator = nccl.init(world_size, unique_id, rank)

    def finish(self) -> None:
        """Wait until the work on this rank's stream is done."""
        self.cuda.stream_synchronize(self.stream)


def results_by_rank(cuda: FakeCuda, nccl: FakeNccl, world_size: int, fn: Callable[[Rank], Any]) -> list[Any]:
    """Run `fn` on every rank in a separate thread; return the results in rank order."""
    unique_id = nccl.unique_id()
    with ThreadPoolExecutor(world_size) as threads:
        running = [
            threads.submit(lambda rank=rank: fn(Rank(nccl, unique_id, rank, world_size))) for rank in range(world_size)
        ]
        return [each.result(60) for each in running]
