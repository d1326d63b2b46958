"""How long a collective on CUDA arrays takes to be on its stream: ``python bench/gpu_launch.py``, on the fake device.

That is what `pg.allreduce` of 8 B takes in steady state, when it launches in the loop before any other rank is asked,
1 ms after the last one, or one right after the other. It is told beside the bare call: the same functions of CUDA and
NCCL, made by hand. Then the time from the call to NCCL's function in a loop that others keep busy, in slices of 5 ms.
The fake's functions are Python: a real device's are not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np
import uvloop
from machine import machine
from markdown import micros, table

from aiocoll import ProcessGroup, testing
from aiocoll.elements.streams import stream_address
from aiocoll.gpu.provider import runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.gpu.groups import Gpus, gpus
from tests.gpu.on_device.worlds import Fake

#: Calls that are measured: in an idle loop, and in a busy one; and those in a row.
CALLS, BUSY_CALLS, ROW = 500, 60, 20
#: Seconds for which another task keeps the loop at a time.
SLICE = 0.005
#: Microseconds: what a call may add to the bare one in an idle loop, and what a launch may take in a busy one.
ADDED, BUSY = 25.0, 1000.0
#: NCCL's numbers of float64 and of sum.
FLOAT64, SUM = 8, 0


class Launches:
    """When each rank has called NCCL last."""

    def __init__(self, gpu: Gpus) -> None:
        self._gpu = gpu
        self.last: dict[int, float] = {}
        gpu.nccl.hooks.append(self._called)

    def _called(self, call: str) -> None:
        if call == "all_reduce":
            self.last[self._gpu.cuda.current()] = perf_counter()


async def bare(gpu: Gpus, calls: int, row: int) -> list[float]:
    """Return the seconds of each call by hand, on a communicator of one rank: it is launched, and waited for after."""
    cuda, nccl = runtime()
    assert nccl is not None
    cuda.use(0)
    array = gpu.tensor(np.ones(1), 0)
    address = array.data_ptr()
    end = nccl.init(1, nccl.unique_id(), 0)
    stream, mark, event = cuda.stream_create(), cuda.event_create(), cuda.event_create()
    before = stream_address(Fake(gpu, 1).stream(0))
    times = []
    for number in range(calls):
        if number % row == 0:
            cuda.event_synchronize(event)
            await asyncio.sleep(0.001)
        start = perf_counter()
        cuda.is_capturing(before)
        cuda.event_record(mark, before)
        cuda.stream_wait(stream, mark)
        end.all_reduce(address, address, 1, FLOAT64, SUM, stream)
        cuda.event_record(event, stream)
        times.append(perf_counter() - start)
    cuda.event_synchronize(event)
    end.destroy()
    return times


async def idle(pg: ProcessGroup, gpu: Gpus, launches: Launches, calls: int, row: int) -> list[float]:
    """Return the seconds of each call until it returns, when it is on its stream."""
    tensor = gpu.tensor(np.ones(1), pg.rank())
    times = []
    for number in range(calls // row + 5):
        works = []
        for _ in range(row):
            start = perf_counter()
            works.append(pg.allreduce(tensor))
            if number >= 5:
                assert launches.last[pg.rank()] > start, "it has not been launched at the call"
                times.append(perf_counter() - start)
        for work in works:
            await work
        await pg.barrier()
        await asyncio.sleep(0.001)  # the launcher has nothing to do any more
    return times


async def busy(pg: ProcessGroup, gpu: Gpus, launches: Launches, calls: int, row: int) -> list[float]:
    """Return the seconds from each call to that of NCCL's function, beside a task that keeps the loop busy."""
    tensor = gpu.tensor(np.ones(1), pg.rank())
    for _ in range(5):
        await pg.allreduce(tensor)
    times: list[float] = []

    async def others() -> None:
        while len(times) < calls:
            end = perf_counter() + SLICE
            while perf_counter() < end:
                pass
            await asyncio.sleep(0)

    async def calling() -> None:
        while len(times) < calls:
            start = perf_counter()
            work = pg.allreduce(tensor)
            launched = launches.last.get(pg.rank(), 0.0)
            await work
            times.append((launched if launched > start else launches.last[pg.rank()]) - start)

    await asyncio.gather(others(), calling())
    return times


async def measured(world_size: int, body: Callable[..., Awaitable[list[float]]], calls: int, row: int) -> list[float]:
    with gpus(world_size) as gpu:
        launches = Launches(gpu)
        found = await testing.run_ranks(world_size, body, gpu, launches, calls, row)
    return [each for times in found for each in times]


async def by_hand(row: int) -> list[float]:
    with gpus(1) as gpu:
        return await bare(gpu, CALLS, row)


def shown(times: list[float]) -> tuple[str, str]:
    return micros(median(times)), micros(quantiles(times, n=100)[98])


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a call on CUDA arrays takes to be on its stream.")
    parser.add_argument("--output", type=Path, help="write the results there too")
    args = parser.parse_args()
    rows: list[Any] = []
    for row, what in ((1, "after 1 ms"), (ROW, "in a row")):
        alone = uvloop.run(by_hand(row))
        rows.append((f"bare, {what}", *shown(alone), "", ""))
        for world_size in (1, 2):
            times = uvloop.run(measured(world_size, idle, CALLS, row))
            added = (median(times) - median(alone)) * 1e6
            met = "met" if added <= ADDED else "missed"
            rows.append((f"{what}, world size {world_size}", *shown(times), f"{added:.1f}", met))
    for world_size in (1, 2):
        times = uvloop.run(measured(world_size, busy, BUSY_CALLS, 1))
        met = "met" if median(times) * 1e6 <= BUSY else "missed"
        rows.append((f"busy loop, world size {world_size}", *shown(times), "", met))
    text = "\n\n".join(
        (
            "# Launching calls on CUDA arrays",
            machine(),
            "**There was no GPU.** All of this was measured on the fake device.",
            table(("8 B, in one process", "µs p50", "p99", "above the bare call", f"{ADDED:g} / {BUSY:g} µs"), rows),
        )
    )
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
