"""How long a collective on CUDA arrays takes to be on its stream: ``python bench/gpu_launch.py``, on the fake device.

That is what `pg.allreduce` of 8 B takes in steady state, when it launches in the loop before any other rank is asked,
1 ms after the last one, or one right after the other: until it calls NCCL's function, and until it returns. It is told
beside the bare call: the same functions of CUDA and NCCL, made by hand. Then the time from the call to NCCL's function
in a loop that others keep busy, in slices of 5 ms.

The fake's functions are Python: a real device's are not. So another table tells how much of a call is theirs. Bare
calls and ours take turns, and what counts is the round that was disturbed least: the speed of the machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
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
from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeCommunicator
from tests.gpu.groups import Gpus, gpus
from tests.gpu.on_device.worlds import Fake

#: Calls that are measured in each round: in an idle loop, and in a busy one; and those in a row.
CALLS, BUSY_CALLS, ROW = 200, 60, 20
#: Rounds of bare calls and of ours, which take turns.
TURNS = 7
#: Seconds for which another task keeps the loop at a time.
SLICE = 0.005
#: Microseconds: what a call may add to the bare one in an idle loop, and what a launch may take in a busy one.
ADDED, BUSY = 25.0, 1000.0
#: NCCL's numbers of float64 and of sum.
FLOAT64, SUM = 8, 0
#: Seconds until NCCL's function is called, until the call returns, and in functions of the fake; how many of these.
Times = tuple[float, float, float, int]


class Launches:
    """When each rank has called NCCL last."""

    def __init__(self, gpu: Gpus) -> None:
        self._gpu = gpu
        self.last: dict[int, float] = {}
        gpu.nccl.hooks.append(self._called)

    def _called(self, call: str) -> None:
        if call == "all_reduce":
            self.last[self._gpu.cuda.current()] = perf_counter()


class Share:
    """How many functions of the fake this thread calls, and the seconds it is in them."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0
        self._thread = threading.get_ident()
        self._is_inside = False

    @contextmanager
    def counting(self, gpu: Gpus) -> Iterator[None]:
        """Count in this block, which itself takes time."""
        before = [(kind, name, getattr(kind, name)) for kind, names in self._counted(gpu) for name in names]
        for kind, name, call in before:
            setattr(kind, name, self._counting(call))
        try:
            yield
        finally:
            for kind, name, call in before:
                setattr(kind, name, call)

    @staticmethod
    def _counted(gpu: Gpus) -> tuple[tuple[type, tuple[str, ...]], ...]:
        return (
            (FakeCuda, ("current", "use", "has_context", "is_capturing", "event_record", "stream_wait")),
            (FakeCommunicator, ("all_reduce",)),
            (gpu.torch.Tensor, ("get_device", "resolve_conj", "resolve_neg", "contiguous", "data_ptr", "numel")),
        )

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            if self._is_inside or threading.get_ident() != self._thread:
                return call(*args)
            self._is_inside = True
            self.calls += 1
            start = perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += perf_counter() - start
                self._is_inside = False

        return counting


async def bare(gpu: Gpus, launches: Launches, share: Share, calls: int, row: int) -> list[Times]:
    """Return the times of each call by hand, on a communicator of one rank: it is launched, and waited for after."""
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
        share.calls, share.seconds = 0, 0.0
        start = perf_counter()
        cuda.is_capturing(before)
        cuda.event_record(mark, before)
        cuda.stream_wait(stream, mark)
        end.all_reduce(address, address, 1, FLOAT64, SUM, stream)
        cuda.event_record(event, stream)
        times.append((launches.last[0] - start, perf_counter() - start, share.seconds, share.calls))
    cuda.event_synchronize(event)
    end.destroy()
    return times


async def idle(pg: ProcessGroup, gpu: Gpus, launches: Launches, share: Share, calls: int, row: int) -> list[Times]:
    """Return the times of each call until it returns, when it is on its stream.

    The device of a rank is the thread's current one, as in a process of its own.
    """
    cuda, _ = runtime()
    tensor = gpu.tensor(np.ones(1), pg.rank())
    times = []
    for number in range(calls // row + 5):
        works = []
        for _ in range(row):
            cuda.use(pg.rank())
            share.calls, share.seconds = 0, 0.0
            start = perf_counter()
            works.append(pg.allreduce(tensor))
            if number >= 5:
                launched = launches.last[pg.rank()]
                assert launched > start, "it has not been launched at the call"
                times.append((launched - start, perf_counter() - start, share.seconds, share.calls))
        for work in works:
            await work
        await pg.barrier()
        await asyncio.sleep(0.001)  # the launcher has nothing to do any more
    return times


async def busy(pg: ProcessGroup, gpu: Gpus, launches: Launches, calls: int) -> list[float]:
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


async def by_hand(row: int, count: bool = False) -> list[Times]:
    """Return the times of bare calls; those in functions of the fake if they `count`."""
    share = Share()
    with gpus(1) as gpu, share.counting(gpu) if count else nullcontext():
        return await bare(gpu, Launches(gpu), share, CALLS, row)


async def by_us(world_size: int, row: int, count: bool = False) -> list[Times]:
    """Return the same of ours."""
    share = Share()
    with gpus(world_size) as gpu, share.counting(gpu) if count else nullcontext():
        found = await testing.run_ranks(world_size, idle, gpu, Launches(gpu), share, CALLS, row)
    return [each for times in found for each in times]


async def in_busy_loop(world_size: int) -> list[float]:
    with gpus(world_size) as gpu:
        found = await testing.run_ranks(world_size, busy, gpu, Launches(gpu), BUSY_CALLS)
    return [each for times in found for each in times]


def p99(times: Sequence[float]) -> str:
    return micros(quantiles(times, n=100)[98])


def verdict(seconds: float, limit: float) -> str:
    return "met" if seconds * 1e6 <= limit else "**missed**"


def least(rounds: Sequence[Sequence[Times]], what: int) -> float:
    """Return the median of the round that was disturbed least."""
    return min(median(each[what] for each in times) for times in rounds)


def rows_of(row: int, what: str) -> Iterator[tuple[str, ...]]:
    """Yield what a bare call takes, and what ours add to it."""
    rounds: dict[int, list[list[Times]]] = {0: [], 1: [], 2: []}
    for _ in range(TURNS):
        for world_size, found in rounds.items():
            found.append(uvloop.run(by_us(world_size, row) if world_size else by_hand(row)))
    bare_early, bare_whole = (least(rounds[0], each) for each in (0, 1))
    for world_size, found in rounds.items():
        early, whole = (least(found, each) for each in (0, 1))
        shown = (micros(early), micros(whole), p99([each[1] for times in found for each in times]))
        if not world_size:
            yield f"bare, {what}", *shown, "", "", ""
            continue
        added = (micros(early - bare_early), micros(whole - bare_whole))
        yield f"{what}, world size {world_size}", *shown, *added, verdict(whole - bare_whole, ADDED)


def shares_of(row: int, what: str) -> Iterator[tuple[str, ...]]:
    """Yield how much of a call is the fake's, in the round that was disturbed least."""
    for name, run in (("bare", by_hand), ("ours", partial(by_us, 1))):
        rounds = [uvloop.run(run(row, True)) for _ in range(TURNS)]
        times = min(rounds, key=lambda times: median(each[1] for each in times))
        inside, calls = median(each[2] for each in times), median(each[3] for each in times)
        rest = median(each[1] - each[2] for each in times)
        yield f"{name}, {what}", f"{calls:g}", micros(inside), micros(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a call on CUDA arrays takes to be on its stream.")
    parser.add_argument("--output", type=Path, help="write the results there too")
    args = parser.parse_args()
    rows: list[Any] = []
    shares: list[Any] = []
    for row, what in ((1, "after 1 ms"), (ROW, "in a row")):
        rows += rows_of(row, what)
        shares += shares_of(row, what)
    for world_size in (1, 2):
        times = uvloop.run(in_busy_loop(world_size))
        name = f"busy loop, world size {world_size}"
        rows.append((name, micros(median(times)), "", p99(times), "", "", verdict(median(times), BUSY)))
    head = (
        "8 B, in one process",
        "to NCCL, µs p50",
        "until it returns",
        "p99",
        "above bare, to NCCL",
        "until it returns",
    )
    text = "\n\n".join(
        (
            "# Launching calls on CUDA arrays",
            machine(),
            "**There was no GPU.** All of this was measured on the fake device.",
            table((*head, f"{ADDED:g} / {BUSY:g} µs"), rows),
            "How much of a call is the fake's, world size 1; to count that takes time, too:",
            table(("8 B", "functions of the fake", "µs p50 in them", "the rest"), shares),
        )
    )
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
