"""Benchmark cases with many calls in flight at a time, and their arrays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aiocoll.algorithms.spec import spec_of
from aiocoll.cli import workload
from aiocoll.cli.workload import Workload


class Case(NamedTuple):
    """A benchmark case: `inflight` calls of a collective at a time, each on an array or block of `nbytes` bytes."""

    kind: str
    nbytes: int
    inflight: int = 1

    def each(self, world_size: int) -> workload.Case:
        """Return the case of a single call, as `aiocoll.cli.workload` defines cases."""
        blocks = world_size if spec_of(self.kind).in_blocks else 1
        return workload.Case(self.kind, self.nbytes * blocks)

    def size(self, world_size: int) -> int:
        return self.each(world_size).size(world_size)


class Workloads:
    """The arrays of one rank for all calls of a case, with the methods that `aiocoll.cli.measure` uses.

    Attributes:
        all: the arrays of each call.
    """

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case = case.each(world_size)
        self.all = [Workload(self.case, rank, world_size) for _ in range(case.inflight)]
        self.rounds = self.all[0].rounds

    def fill_patterns(self) -> None:
        for each in self.all:
            each.fill_patterns()

    def fill_repeatable(self) -> None:
        for each in self.all:
            each.fill_repeatable()

    def count_wrong(self) -> int:
        return sum(each.count_wrong() for each in self.all)

    def count_wrong_after(self, rounds: int) -> int:
        return sum(each.count_wrong_after(rounds) for each in self.all)


def calls_of(starts: Sequence[Callable[[], Awaitable[object]]]) -> Callable[[], Awaitable[object]]:
    """Return an async function that starts one call with each function in `starts`, then awaits all calls."""
    if len(starts) == 1:
        return starts[0]

    async def calls() -> None:
        for work in [start() for start in starts]:
            await work

    return calls
