"""Measurement of one benchmark case: works with any library, and returns the same timing on all ranks.

The first call and the last one work on fresh arrays, and their results are checked. The calls in between run in blocks.
The contents of the arrays are checked after each block, outside of the measured time. Nothing but the calls
synchronizes the ranks within a block. The first call of a block is not counted, because the ranks enter it after checks
of different length. The time of an iteration is the time of its slowest rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns, process_time
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from aiocoll.cli.workload import Case, Workload, bus_factor

__all__ = ["Combine", "Effort", "Figures", "Times", "Timing", "measure", "times_of"]

T = TypeVar("T")

#: Minimum size in bytes of an array that takes milliseconds to fill or check.
LARGE = 16 << 20
#: A function that runs a number of iterations, and returns the nanoseconds of each on this rank.
Times = Callable[[int], Awaitable[list[int]]]
#: A function that reduces float64 values over all ranks, in place.
Combine = Callable[[npt.NDArray[np.float64], Literal["sum", "max"]], Awaitable[object]]


class Effort(NamedTuple):
    """The duration of measuring a case: the intended seconds, and the minimum and maximum number of iterations."""

    seconds: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Timing:
    """The result of measuring one benchmark case: times, CPU time and wrong elements.

    Attributes:
        nanoseconds: time of each iteration on its slowest rank.
        cpu: CPU seconds per iteration, of all ranks together.
        wrong: number of elements with a wrong value, on all ranks, in all checks.
    """

    nanoseconds: list[int]
    cpu: float
    wrong: int


class Figures(NamedTuple):
    """The figures of a benchmark case in the printed table: seconds per call, and bandwidths in bytes per second."""

    p50: float
    p95: float
    p99: float
    algbw: float
    busbw: float

    @classmethod
    def of(cls, case: Case, world_size: int, nanoseconds: Sequence[int]) -> Figures:
        """Compute the table figures of a case from the nanoseconds of its iterations."""
        return cls.from_percentiles(case, world_size, *np.percentile(nanoseconds, (50, 95, 99)) / 1e9)

    @classmethod
    def from_percentiles(cls, case: Case, world_size: int, p50: float, p95: float, p99: float) -> Figures:
        """Compute the table figures of a case from percentiles in seconds; the median gives the bandwidths."""
        algbw = case.size(world_size) / p50
        return cls(float(p50), float(p95), float(p99), float(algbw), float(algbw * bus_factor(case.kind, world_size)))


async def measure(load: Workload, times: Times, combine: Combine, effort: Effort) -> Timing:
    """Time one benchmark case. All ranks must call this with the same `effort`.

    Args:
        load: the arrays of one iteration.
        times: runs iterations.
        combine: combines the results of the ranks.
        effort: when to stop.

    Returns:
        The timing, the same on all ranks.
    """
    wrong = await _check_results(load, times)
    taken: list[int] = []
    cpu, calls, most = 0.0, 0, load.rounds - 1
    rounds = 1
    warm = False
    while not warm or not _is_enough(taken, effort):
        await _run_outside_loop(load, load.fill_repeatable)
        start = process_time()
        own = await times(rounds + 1)
        cpu += process_time() - start if warm else 0.0
        wrong += await _run_outside_loop(load, partial(load.count_wrong_after, rounds + 1))
        slowest = np.array(own, np.float64)
        await combine(slowest, "max")
        if warm:
            taken += [int(value) for value in slowest[1:]]
            calls += rounds + 1
        warm = True
        rounds = _next_iterations(taken, median(slowest[-rounds:]), effort, most)
    wrong += await _check_results(load, times)
    totals = np.array([cpu / calls, wrong], np.float64)
    await combine(totals, "sum")
    return Timing(taken, float(totals[0]), int(totals[1]))


def times_of(call: Callable[[], Awaitable[object]]) -> Times:
    """Return a function that makes and awaits `call` repeatedly, and returns the nanoseconds of each call."""

    async def times(rounds: int) -> list[int]:
        taken = []
        for _ in range(rounds):
            start = perf_counter_ns()
            await call()
            taken.append(perf_counter_ns() - start)
        return taken

    return times


async def _check_results(load: Workload, times: Times) -> int:
    await _run_outside_loop(load, load.fill_patterns)
    await times(1)
    return await _run_outside_loop(load, load.count_wrong)


async def _run_outside_loop(load: Workload, work: Callable[[], T]) -> T:
    """Call `work`, which fills or checks the arrays of `load`. Use a thread for large arrays, to keep the loop free."""
    return await asyncio.to_thread(work) if load.case.nbytes >= LARGE else work()


def _is_enough(taken: Sequence[int], effort: Effort) -> bool:
    # All ranks pass the same times, so that all ranks make the same decision.
    count = len(taken)
    return count >= effort.most or (count >= effort.least and sum(taken) >= effort.seconds * 1e9)


def _next_iterations(taken: Sequence[int], each: float, effort: Effort, most: int) -> int:
    """Return the number of iterations in the next round, by the remaining time and the minimum number of iterations.

    After the least number, a block has at most twice the iterations before it: calls may become slower than the `each`
    nanoseconds of the last block. 1 MiB reduced by a tested Open MPI took 0.5 s where the calls before took 1 ms.
    """
    left = max(int((effort.seconds * 1e9 - sum(taken)) / max(each, 1)), effort.least - len(taken))
    return max(1, min(left, most, effort.most - len(taken), max(effort.least, 2 * len(taken))))
