"""Predictions of `ProcessGroup.time_estimator`, compared with measured times: `python bench/estimate.py`.

Each transport is measured twice: with the default numbers, and with those that `aiocoll bench --tune` finds on this
machine. The ranks enter each call together, after a barrier, and its time is that of the slowest rank. Other work on
the machine can only add to that, so the figure is the lower quartile of all calls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from aiocoll import GroupOptions, ProcessGroup, ReduceOp
from aiocoll.algorithms.machine import MEDIA, Medium
from aiocoll.cli import tune
from aiocoll.cli.calls import call_of
from aiocoll.cli.workload import Case, Workload
from aiocoll.testing import run_processes
from aiocoll.tuning import dumps
from aiocoll.work import Work

KINDS = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter", "scan")
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24)
#: Number of calls per case, including warm-up, and number of warm-up calls.
ROUNDS, WARM_UP = 60, 5
#: Number of launches of two ranks for tuning, and seconds of each, as in `aiocoll bench --tune`.
LAUNCHES, SECONDS = 5, 0.5


class Row(NamedTuple):
    """A case, with the predicted and the measured seconds of a call."""

    case: Case
    algorithm: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


async def rows(pg: ProcessGroup, cases: list[Case]) -> list[Row]:
    """Measure and predict all cases on one rank of a group."""
    found = []
    for case in cases:
        load = Workload(case, pg.rank(), pg.size())
        call = call_of(pg, load)
        with pg.time_estimator() as estimate:
            call()
        (one,) = estimate.calls
        found.append(Row(case, one.algorithm or "", one.seconds, await measured(pg, call)))
    return found


async def measured(pg: ProcessGroup, call: Callable[[], Work[Any]]) -> float:
    """Return the median seconds of a call that all ranks enter together."""
    times = np.zeros(ROUNDS)
    for number in range(ROUNDS):
        await pg.barrier()
        start = perf_counter()
        await call()
        times[number] = perf_counter() - start
    await pg.allreduce(times, ReduceOp.MAX)
    return float(np.quantile(times[WARM_UP:], 0.25))


def table(found: list[Row]) -> str:
    lines = [f"{'':15}{'bytes':>9}  {'algorithm':14}{'predicted':>12}{'measured':>12}{'ratio':>7}"]
    for case, algorithm, predicted, measured in found:
        lines.append(
            f"{case.kind:15}{case.nbytes:9}  {algorithm:14}{predicted * 1e6:9.1f} µs{measured * 1e6:9.1f} µs"
            f"{predicted / measured:7.2f}"
        )
    return "\n".join(lines)


def summary(found: list[Row]) -> str:
    ratios = sorted(row.ratio for row in found)
    factors = sorted(max(row.ratio, 1 / row.ratio) for row in found)
    return (
        f"ratio {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}; off by a factor of "
        f"{median(factors):.2f} in the median, {factors[len(factors) * 9 // 10]:.2f} in nine of ten"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/estimate.py", description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[2], metavar="RANKS", help="world sizes (default: 2)")
    parser.add_argument("--transport", nargs="+", choices=MEDIA, default=["tcp", "shm"])
    args = parser.parse_args()
    cases = [Case(kind, size) for kind in KINDS for size in SIZES] + [Case("barrier", 0)]
    launches = await tune.measure(LAUNCHES, SECONDS)
    machines = {medium: min(found) for medium, found in launches.items()}
    for medium, machine in machines.items():
        print(medium, ", ".join(f"{name} {value:.2g} s" for name, value in machine._asdict().items()))
    with tempfile.TemporaryDirectory() as folder:
        tuned = Path(folder, "tuning.json")
        tuned.write_text(dumps(machines, "now"))  # noqa: ASYNC240 - nothing else is going on
        # A directory without a tuning file, so that the defaults apply.
        os.environ["XDG_CACHE_HOME"] = folder
        for n in args.n:
            for transport in args.transport:
                for name, path in (("defaults", None), ("tuned", str(tuned))):
                    await compare(n, transport, name, path, cases)


async def compare(n: int, transport: Medium, name: str, path: str | None, cases: list[Case]) -> None:
    options = GroupOptions(transport=transport, tuning=path)
    found = (await run_processes(n, rows, cases, options=options, timeout=600.0, loop="uvloop"))[0]
    print(f"\n{n} ranks, {transport}, {name}\n{table(found)}\n{summary(found)}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
