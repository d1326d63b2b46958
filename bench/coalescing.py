"""Speedup by coalescing calls: `python bench/coalescing.py`, in under a minute.

Two ranks, processes on this host, allreduce 1,000 float32 tensors of 4 KiB in three ways: each awaited before the next
is called, all in flight together, and in one `coalescing()` block. The ways alternate in each round, and the time of a
round is that of its slower rank. The table has the median and the minimum over all rounds. Where torch can be
installed, it also has Gloo with its coalescing manager. This file is also the program of a rank:
`coalescing.py LIBRARY TRANSPORT RANK FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

WORLD_SIZE, CALLS, NBYTES = 2, 1000, 4096
TRANSPORTS = ("tcp", "unix", "shm")
#: Measured rounds, and warm-up rounds before them.
ROUNDS, WARM = 30, 5
#: Number of launches of each system. A figure is the median over the rounds of all launches.
LAUNCHES = 2
#: Seconds until a rank counts as hung; a normal run takes a tenth of that.
LIMIT = 60
KEY = "00" * 16

Way = Callable[[], Awaitable[None]]
#: Seconds of each measured round, by way of calling.
Times = Mapping[str, Sequence[float]]


# -- one rank


async def aiocoll(transport: str, rank: int) -> dict[str, list[float]]:
    import numpy as np

    from aiocoll import GroupOptions, new_group

    options = GroupOptions(transport=transport, job_key=KEY)  # type: ignore[arg-type]
    tensors = [np.ones(NBYTES // 4, np.float32) for _ in range(CALLS)]
    async with new_group(
        init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=WORLD_SIZE, options=options
    ) as pg:

        async def one_by_one() -> None:
            for tensor in tensors:
                await pg.allreduce(tensor)

        async def in_flight() -> None:
            for work in [pg.allreduce(tensor) for tensor in tensors]:
                await work

        async def coalesced() -> None:
            async with pg.coalescing():
                for tensor in tensors:
                    pg.allreduce(tensor)

        async def ready() -> None:
            for tensor in tensors:
                tensor[:] = 1
            await pg.barrier()

        times = await measure({"one by one": one_by_one, "in flight": in_flight, "coalesced": coalesced}, ready)
        assert all((tensor == WORLD_SIZE).all() for tensor in tensors), "a sum is wrong"
    return times


async def gloo(transport: str, rank: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/gloo", rank=rank, world_size=WORLD_SIZE)
    tensors = [torch.ones(NBYTES // 4) for _ in range(CALLS)]

    async def one_by_one() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    async def in_flight() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    async def coalesced() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()

    async def ready() -> None:
        for tensor in tensors:
            tensor.fill_(1)
        dist.barrier()

    times = await measure({"one by one": one_by_one, "in flight": in_flight, "coalesced": coalesced}, ready)
    assert all((tensor == WORLD_SIZE).all() for tensor in tensors), "a sum is wrong"
    dist.destroy_process_group()
    return times


async def measure(ways: Mapping[str, Way], ready: Way) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM + ROUNDS):
        for name, way in ways.items():
            await ready()
            start = perf_counter()
            await way()
            if number >= WARM:
                times[name].append(perf_counter() - start)
    return times


def run_rank(library: str, transport: str, rank: int) -> None:
    run: Callable[[str, int], Awaitable[Any]] = gloo if library == "gloo" else aiocoll
    if library == "gloo":
        times = asyncio.run(run(transport, rank))  # type: ignore[arg-type]
    else:
        import uvloop

        times = uvloop.run(run(transport, rank))  # type: ignore[arg-type]
    Path(f"{rank}.json").write_text(json.dumps(times))


# -- all ranks


def launch(python: str, library: str, transport: str) -> dict[str, list[float]] | str:
    """Return the times of one launch, in each round on the slower rank; or the reason why the launch failed."""
    from launch import run_all

    program = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as folder:
        commands = [[python, program, library, transport, str(rank)] for rank in range(WORLD_SIZE)]
        if isinstance(outputs := run_all(commands, folder, LIMIT), str):
            return outputs
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def row(name: str, launches: Sequence[dict[str, list[float]] | str]) -> Sequence[object]:
    """Return the table row of a system, from its launches."""
    failed = next((each for each in launches if isinstance(each, str)), None)
    if failed is not None:
        return (name, "failed", failed, *[""] * 4)
    times = {way: [t for each in launches for t in each[way]] for way in launches[0]}  # type: ignore[index, union-attr]
    micros = {way: statistics.median(each) / CALLS * 1e6 for way, each in times.items()}
    return (
        name,
        *(f"{each:.2f}" for each in micros.values()),
        f"{min(times['coalesced']) / CALLS * 1e6:.2f}",
        f"{micros['one by one'] / micros['coalesced']:.1f}x",
        f"{micros['in flight'] / micros['coalesced']:.1f}x",
    )


def main() -> None:
    from environments import Unavailable, prepare
    from markdown import ranks_of, size_of, table

    systems = [(f"aiocoll {transport}", sys.executable, "aiocoll", transport) for transport in TRANSPORTS]
    try:
        systems.append(("gloo", str(prepare("torch")), "gloo", "tcp"))
    except Unavailable as error:
        print(f"No Gloo: {error}", file=sys.stderr)
    found: dict[str, list[dict[str, list[float]] | str]] = {name: [] for name, *_ in systems}
    for _ in range(LAUNCHES):
        for name, *how in systems:
            found[name].append(launch(*how))
    head = (
        "system",
        "one by one",
        "in flight",
        "coalesced",
        "least",
        "one by one / coalesced",
        "in flight / coalesced",
    )
    print(f"### {ranks_of(WORLD_SIZE)}, {CALLS:,} allreduces of {size_of(NBYTES)}: µs per call\n")
    print(table(head, [row(name, launches) for name, launches in found.items()]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
