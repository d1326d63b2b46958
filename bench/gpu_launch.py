"""Time until a collective on CUDA arrays is enqueued on its stream: ``python bench/gpu_launch.py [--kind torch]``.

The first table is for `pg.allreduce` of 8 B in steady state, when the call launches without waiting for other ranks. It
has calls every 1 ms and consecutive calls, each with the time until NCCL's function is called, and the time until
`allreduce` returns. For comparison it has the bare call: the same functions of CUDA and NCCL, called by hand. Further
rows have the time from the call to NCCL's function in a loop that other tasks keep busy, in slices of 5 ms.

A second table shows how much of a call is spent in functions of CUDA and NCCL. Those of the fake device, which
``--fake`` uses, are Python. Bare calls and calls of aiocoll alternate. The figure is the round with the least
disturbance, because the speed of the machine changes.
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
from gpu_devices import add_arguments, choose_kind
from machine import machine
from markdown import micros, table

from aiocoll import ProcessGroup, testing
from aiocoll.elements import buffers
from aiocoll.gpu.provider import provide, runtime
from aiocoll.gpu.streams import stream_address

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.gpu.on_device.clocked import Clocked, ClockedEnd
from tests.gpu.on_device.worlds import World, world

#: Number of measured calls per round in an idle loop, and in a busy loop; number of calls started in a row.
CALLS, BUSY_CALLS, ROW = 200, 60, 20
#: Number of rounds, in which bare calls and aiocoll's calls alternate: on a real device, where each round makes a
#: communicator, and on the fake device.
TURNS, FAKE_TURNS = 3, 7
#: Seconds for which another task blocks the loop at a time.
SLICE = 0.005
#: Microseconds that aiocoll may add to a bare call in an idle loop, and that a launch may take in a busy loop.
ADDED, BUSY = 25.0, 1000.0
#: NCCL's constants for float64 and sum.
FLOAT64, SUM = 8, 0
#: Times of one call: seconds until it calls NCCL's function, seconds until it returns, seconds in device functions; and
#: number of device function calls.
Times = tuple[float, float, float, int]


class Share:
    """A counter of this thread's calls of CUDA and NCCL functions, or fake ones, and of the seconds spent in them."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0
        self._thread = threading.get_ident()
        self._is_inside = False

    @contextmanager
    def counting(self, made: World) -> Iterator[None]:
        """Count this thread's calls of device functions within the block. The counting makes each call slower."""
        before = [(owner, name, getattr(owner, name)) for owner, names in self._counted(made) for name in names]
        for owner, name, call in before:
            setattr(owner, name, self._counting(call))
        try:
            yield
        finally:
            for owner, name, call in before:
                setattr(owner, name, call)

    @staticmethod
    def _counted(made: Any) -> tuple[tuple[Any, tuple[str, ...]], ...]:
        calls = ("current", "use", "has_context", "is_capturing", "event_record", "stream_wait")
        of_arrays = ("get_device", "resolve_conj", "resolve_neg", "contiguous", "data_ptr", "numel")
        return (
            (runtime()[0], calls),
            (ClockedEnd, ("all_reduce",)),
            *([(made.gpu.torch.Tensor, of_arrays)] if made.kind == "fake" else []),
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


@contextmanager
def clocked(kind: str, devices: int) -> Iterator[tuple[World, Clocked]]:
    """Provide devices, and an NCCL wrapper that records the times of calls."""
    with world(kind, devices=devices) as made:
        cuda, nccl = runtime()
        clock = Clocked(nccl)
        with provide(cuda, clock):  # type: ignore[arg-type]
            yield made, clock


async def bare(made: World, clock: Clocked, share: Share, calls: int, row: int) -> list[Times]:
    """Return the times of bare calls on a communicator of one rank. Rows of `row` calls are launched without a wait."""
    cuda, nccl = runtime()
    assert nccl is not None
    cuda.use(0)
    tensor = made.tensor(np.ones(1))
    address = buffers.view(tensor).array.ptr
    end = nccl.init(1, nccl.unique_id(), 0)
    stream, mark, event = cuda.stream_create(), cuda.event_create(), cuda.event_create()
    before = stream_address(made.stream(0))
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
        times.append((clock.last[0] - start, perf_counter() - start, share.seconds, share.calls))
    cuda.event_synchronize(event)
    end.destroy()
    return times


async def idle(pg: ProcessGroup, made: World, clock: Clocked, share: Share, calls: int, row: int) -> list[Times]:
    """Return the times of aiocoll's calls in an otherwise idle loop. A call returns when it is on its stream.

    The device of a rank is the thread's current device, as in a process of its own.
    """
    cuda, _ = runtime()
    tensor = made.tensor(np.ones(1), pg.rank())
    times = []
    for number in range(calls // row + 5):
        works = []
        for _ in range(row):
            cuda.use(pg.rank())
            share.calls, share.seconds = 0, 0.0
            start = perf_counter()
            works.append(pg.allreduce(tensor))
            if number >= 5:
                launched = clock.last[pg.rank()]
                assert launched > start, "the call returned before its launch"
                times.append((launched - start, perf_counter() - start, share.seconds, share.calls))
        for work in works:
            await work
        await pg.barrier()
        await asyncio.sleep(0.001)  # lets the launcher thread become idle
    return times


async def busy(pg: ProcessGroup, made: World, clock: Clocked, calls: int) -> list[float]:
    """Return the seconds from each call until NCCL's function is called, while another task keeps the loop busy."""
    tensor = made.tensor(np.ones(1), pg.rank())
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
            launched = clock.last.get(pg.rank(), 0.0)
            await work
            times.append((launched if launched > start else clock.last[pg.rank()]) - start)

    await asyncio.gather(others(), calling())
    return times


def turns(made: World) -> int:
    return FAKE_TURNS if made.kind == "fake" else TURNS


async def time_bare_calls(made: World, clock: Clocked, row: int, count: bool = False) -> list[Times]:
    """Return the times of bare calls; if `count`, also count the time in device functions."""
    share = Share()
    with share.counting(made) if count else nullcontext():
        return await bare(made, clock, share, CALLS, row)


async def time_aiocoll_calls(
    made: World, clock: Clocked, world_size: int, row: int, count: bool = False
) -> list[Times]:
    """Return the times of aiocoll's calls; if `count`, also count the time in device functions."""
    share = Share()
    with share.counting(made) if count else nullcontext():
        found = await testing.run_ranks(world_size, idle, made, clock, share, CALLS, row)
    return [each for times in found for each in times]


async def in_busy_loop(made: World, clock: Clocked, world_size: int) -> list[float]:
    found = await testing.run_ranks(world_size, busy, made, clock, BUSY_CALLS)
    return [each for times in found for each in times]


def p99(times: Sequence[float]) -> str:
    return micros(quantiles(times, n=100)[98])


def verdict(seconds: float, limit: float) -> str:
    return "met" if seconds * 1e6 <= limit else "**missed**"


def least(rounds: Sequence[Sequence[Times]], what: int) -> float:
    """Return the smallest of the rounds' medians: other work on the machine has disturbed that round least."""
    return min(median(each[what] for each in times) for times in rounds)


def rows_of(made: World, clock: Clocked, sizes: Sequence[int], row: int, what: str) -> Iterator[tuple[str, ...]]:
    """Yield table rows for bare calls and for aiocoll's calls, with the time that aiocoll adds."""
    rounds: dict[int, list[list[Times]]] = {size: [] for size in (0, *sizes)}
    for _ in range(turns(made)):
        for world_size, found in rounds.items():
            found.append(
                uvloop.run(
                    time_aiocoll_calls(made, clock, world_size, row)
                    if world_size
                    else time_bare_calls(made, clock, row)
                )
            )
    bare_early, bare_whole = (least(rounds[0], each) for each in (0, 1))
    for world_size, found in rounds.items():
        early, whole = (least(found, each) for each in (0, 1))
        shown = (micros(early), micros(whole), p99([each[1] for times in found for each in times]))
        if not world_size:
            yield f"bare, {what}", *shown, "", "", ""
            continue
        added = (micros(early - bare_early), micros(whole - bare_whole))
        yield f"{what}, world size {world_size}", *shown, *added, verdict(whole - bare_whole, ADDED)


def shares_of(made: World, clock: Clocked, row: int, what: str) -> Iterator[tuple[str, ...]]:
    """Yield table rows with the share of a call's time in device functions, in the least disturbed round."""
    for name, run in (
        ("bare", partial(time_bare_calls, made, clock)),
        ("aiocoll", partial(time_aiocoll_calls, made, clock, 1)),
    ):
        rounds = [uvloop.run(run(row, True)) for _ in range(turns(made))]
        times = min(rounds, key=lambda times: median(each[1] for each in times))
        inside, calls = median(each[2] for each in times), median(each[3] for each in times)
        rest = median(each[1] - each[2] for each in times)
        yield f"{name}, {what}", f"{calls:g}", micros(inside), micros(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description="The time until a call on CUDA arrays is on its stream.")
    add_arguments(parser)
    parser.add_argument("--output", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    kind = choose_kind(parser, args)
    sizes = (1, 2) if args.fake else (1,)  # each rank of a process needs its own device
    rows: list[Any] = []
    shares: list[Any] = []
    with clocked(kind, len(sizes)) as (made, clock):
        for row, what in ((1, "after 1 ms"), (ROW, "in a row")):
            rows += rows_of(made, clock, sizes, row, what)
            shares += shares_of(made, clock, row, what)
        for world_size in sizes:
            times = uvloop.run(in_busy_loop(made, clock, world_size))
            name = f"busy loop, world size {world_size}"
            rows.append((name, micros(median(times)), "", p99(times), "", "", verdict(median(times), BUSY)))
    head = (
        "8 B, in one process",
        "to NCCL, µs p50",
        "until it returns",
        "p99",
        "above bare, to NCCL",
        "above bare, until it returns",
    )
    texts = ["# Launching calls on CUDA arrays", machine(), table((*head, f"{ADDED:g} / {BUSY:g} µs"), rows)]
    if args.fake:
        texts.insert(2, "**This run used no GPU.** All times were measured on the fake device.")
    texts += [
        "Share of CUDA and NCCL functions in a call, world size 1; counting them takes time, too:",
        table(("8 B", "functions", "µs p50 in them", "the rest"), shares),
    ]
    text = "\n\n".join(texts)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
