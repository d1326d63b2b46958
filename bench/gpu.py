"""Time of calls on CUDA arrays: ``python bench/gpu.py [--kind torch] [--quick]``, in 2 minutes at most.

The first table is for one process whose group is alone on one device, with NCCL on float32. It compares these ways,
which alternate:

- *bare*: an NCCL call, and the wait for an event after it;
- *bare, in order*: the same call, ordered after the caller's stream;
- *awaited*: an awaited collective of aiocoll. Its time above the bare call is the cost of aiocoll;
- *on_stream*: the time until `on_stream` lets the caller continue;
- *in flight, each*: one of many calls in flight.

Further tables are for several processes on one device, staged, compared with arrays on the host. They also have the
agreement before every call, measured on an array without elements, which needs nothing else.

``--fake`` measures the same on the fake device, whose times are unlike those of a real one. The code of aiocoll is the
same, except for CuPy's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import uvloop
from gpu_devices import add_arguments, choose_kind
from inflight import Case
from machine import machine
from markdown import micros, size_of, table

from aiocoll import GroupOptions, ProcessGroup, new_group, testing
from aiocoll.cli.measure import Timing
from aiocoll.elements import buffers
from aiocoll.gpu.provider import runtime
from aiocoll.gpu.streams import stream_address
from aiocoll.group.parts import parts_of
from aiocoll.store import HashStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.gpu.on_device.worlds import World, world

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
#: Sizes of a quick run.
QUICK = (4, 64 << 10, 4 << 20)
#: Microseconds that aiocoll may add to an awaited NCCL call, not counting the ranks' agreement before the call.
LIMIT = 60
#: Maximum number of calls in flight at a time, and maximum bytes of their arrays together.
IN_FLIGHT, MOST = 16, 256 << 20
#: NCCL's constants for float32 and sum.
FLOAT32, SUM = 7, 0
#: Column heads of the table for NCCL: the ways of calling.
EACH = "in flight, each"
HEADS = ("bare", "bare, in order", "awaited", "on_stream", EACH, "agreed", "marked", "host, 4 B")
Way = Callable[[], Awaitable[None]]
#: Seconds of each measured iteration, by way of calling.
Times = dict[str, list[float]]


async def timed(ways: dict[str, Way], rounds: int) -> Times:
    """Measure all ways of calling in turn; the first tenth of the iterations is warm-up."""
    times: Times = {name: [] for name in ways}
    for number in range(rounds + rounds // 10 + 1):
        for name, way in ways.items():
            start = perf_counter()
            await way()
            if number > rounds // 10:
                times[name].append(perf_counter() - start)
    return times


@contextmanager
def bare_ways(made: World, tensor: Any) -> Iterator[dict[str, Way]]:
    """Yield the ways of calling without aiocoll: a bare NCCL call, and one ordered after the caller's stream."""
    cuda, nccl = runtime()
    assert nccl is not None
    array = buffers.view(tensor).array
    communicator = nccl.init(1, nccl.unique_id(), 0)
    stream, event, mark = cuda.stream_create(), cuda.event_create(), cuda.event_create()
    before = stream_address(made.stream(0))

    async def bare() -> None:
        communicator.all_reduce(array.ptr, array.ptr, array.size, FLOAT32, SUM, stream)
        cuda.event_record(event, stream)
        cuda.event_synchronize(event)

    async def in_order() -> None:
        cuda.event_record(mark, before)
        cuda.stream_wait(stream, mark)
        await bare()

    yield {"bare": bare, "bare, in order": in_order}
    communicator.destroy()


def aiocoll_ways(pg: ProcessGroup, made: World, tensors: Sequence[Any]) -> dict[str, Way]:
    """Return the ways of calling with aiocoll."""
    empty, array = made.tensor(np.zeros(0, np.float32)), np.zeros(1, np.float32)

    async def awaited() -> None:
        await pg.allreduce(tensors[0])

    async def ordered() -> None:
        await pg.allreduce(tensors[0]).on_stream()

    async def in_flight() -> None:
        for work in [pg.allreduce(tensor) for tensor in tensors]:
            await work

    async def agreed() -> None:
        await pg.allreduce(empty)

    async def on_host() -> None:
        await pg.allreduce(array)

    async def marked() -> None:
        array = buffers.view(empty).array
        parts_of(pg).dispatcher.on_device([array])
        state = parts_of(pg).dispatcher.device_calls.state
        assert state is not None
        state.unmark(state.mark([array]))

    ways = (awaited, ordered, in_flight, agreed, marked, on_host)
    return dict(zip(HEADS[2:], ways, strict=True))


async def native(made: World, nbytes: int, rounds: int) -> Times:
    """Measure calls through NCCL, on a rank that shares its device with no other rank."""
    tensors = [made.tensor(np.zeros(nbytes // 4, np.float32)) for _ in range(min(IN_FLIGHT, MOST // nbytes))]
    with bare_ways(made, tensors[0]) as ways:
        async with new_group(store=HashStore(), rank=0, world_size=1) as pg:
            await pg.allreduce(tensors[0])
            state = parts_of(pg).dispatcher.device_calls.state
            assert state is not None
            assert state.decision is not None
            assert state.decision.native, state.decision.why
            times = await timed({**ways, **aiocoll_ways(pg, made, tensors)}, rounds)
    times[EACH] = [each / len(tensors) for each in times[EACH]]
    return times


async def staged(pg: ProcessGroup, kind: str, sizes: Sequence[int], most: int) -> dict[int, Times]:
    """Measure staged calls on one of several ranks that share a device."""
    found = {}
    with world(kind) as made:
        for nbytes in sizes:
            array = np.zeros(nbytes // 4, np.float32)
            tensor = made.tensor(array)

            async def on_device(tensor: Any = tensor) -> None:
                await pg.allreduce(tensor)

            async def on_host(array: Any = array) -> None:
                await pg.allreduce(array)

            found[nbytes] = await timed({"staged": on_device, "host": on_host}, rounds_of(nbytes, most))
        empty = made.tensor(np.zeros(0, np.float32))

        async def agree() -> None:
            await pg.allreduce(empty)

        found[0] = await timed({"agreement": agree}, most)
        await pg.shutdown()
    return found


def rounds_of(nbytes: int, most: int) -> int:
    """Return the number of iterations for an array size, at most `most`."""
    return max(5, min(most, (1 << 30) // max(nbytes, 1)))


def native_table(found: dict[int, Times]) -> str:
    rows = []
    for nbytes, times in found.items():
        p50 = {name: median(each) for name, each in times.items()}
        least = {name: min(each) for name, each in times.items()}
        added, fewest = p50["awaited"] - p50["bare"], least["awaited"] - least["bare"]
        rows.append((size_of(nbytes), *(micros(each) for each in p50.values()), micros(added), micros(fewest)))
    head = ("size", *HEADS, "awaited - bare", "difference of minima")
    return f"### Through NCCL, 1 rank, µs p50\n\n{table(head, rows)}"


def verdict(found: dict[int, Times]) -> str:
    """Return a text that compares the time that aiocoll adds to the smallest call with the promised limit."""
    nbytes = min(found)
    p50 = {name: median(each) * 1e6 for name, each in found[nbytes].items()}
    whole = p50["awaited"] - p50["bare"]
    agreement = p50["agreed"] - p50["host, 4 B"] - p50["marked"]
    added = whole - agreement
    met = "met" if added <= LIMIT else "**missed**"
    return (
        f"An awaited allreduce of {size_of(nbytes)} takes {whole:.1f} µs more than the bare call. Of this additional "
        f"time, {agreement:.1f} µs are the agreement of the only rank with itself. The agreement's time is 'agreed' "
        "(a call on no elements) minus 'host, 4 B' (a call on a host array) and minus 'marked'. The column 'marked' is "
        "the time to view the array as flat memory and to record an event on the stream. The rest of the additional "
        f"time is {added:.1f} µs. Its limit of {LIMIT} µs is {met}."
    )


def staged_table(world_size: int, transport: str, found: dict[int, Times]) -> str:
    rows = [
        (size_of(nbytes), micros(median(times["host"])), micros(median(times["staged"])))
        for nbytes, times in found.items()
        if nbytes
    ]
    shown = table(("size", "host", "staged"), rows)
    alone = median(found[0]["agreement"]) * 1e6
    return (
        f"### Staged, {world_size} processes on one device, {transport}, µs p50\n\n{shown}\n\n"
        f"The agreement alone (no elements): {alone:.1f} µs."
    )


def draw(folder: Path, by_nccl: dict[int, Times], by_host: dict[int, Times], world_size: int) -> None:
    """Draw one picture for NCCL, and one picture for staging."""
    from launch import Launch
    from plots import plot
    from results import Results

    for size, found, added in ((1, by_nccl, "awaited"), (world_size, by_host, "staged")):
        names = [name for name in next(iter(found.values())) if name not in (*HEADS[5:], "agreement")]
        results = Results(size, names)
        launches = {}
        for name in names:
            cases = {
                Case("allreduce", nbytes): Timing([int(each * 1e9) for each in times[name]], 0.0, 0)
                for nbytes, times in found.items()
                if nbytes
            }
            launches[name] = Launch(cases, None, 0.0)
        results.rounds.append(launches)
        plot(results, added, folder)


async def staged_of(kind: str, world_size: int, transport: str, sizes: Sequence[int], most: int) -> dict[int, Times]:
    """Measure staged calls on `world_size` processes, and return the results of rank 0."""
    options = GroupOptions(transport=transport)  # type: ignore[arg-type]
    found = await testing.run_processes(
        world_size, staged, kind, sizes, most, options=options, loop="uvloop", timeout=120.0
    )
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of calls on CUDA arrays.")
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="measure few sizes, with few iterations")
    parser.add_argument(
        "--pin", action="store_true", help="keep the process that uses NCCL on one core, for the fake device"
    )
    parser.add_argument("--output", type=Path, help="also write the results to this file")
    parser.add_argument("--plots", type=Path, help="draw pictures into this folder")
    args = parser.parse_args()
    kind = choose_kind(parser, args)
    sizes, most = (QUICK, 100) if args.quick else (SIZES, 1000)
    cores = os.sched_getaffinity(0)
    if args.pin:
        os.sched_setaffinity(0, {max(cores)})
    with world(kind) as made:
        by_nccl = {nbytes: uvloop.run(native(made, nbytes, rounds_of(nbytes, most))) for nbytes in sizes}
    os.sched_setaffinity(0, cores)
    texts = ["# Calls on CUDA arrays", machine()]
    if args.fake:
        texts.append(
            "**This run used no GPU.** All times were measured on the fake device. Host memory simulates device "
            "memory, and threads simulate streams. The times are therefore the times of aiocoll's own code, without "
            "CUDA, NCCL or copies."
        )
    if args.pin:
        texts.append("The process that used NCCL was kept on one core.")
    texts += [native_table(by_nccl), verdict(by_nccl)]
    for world_size, transport in ((2, "shm"), (2, "tcp"), (4, "shm")):
        found = uvloop.run(staged_of(kind, world_size, transport, sizes, most))
        texts.append(staged_table(world_size, transport, found))
        if args.plots and (world_size, transport) == (2, "shm"):
            draw(args.plots, by_nccl, found, world_size)
    text = "\n\n".join(texts) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
