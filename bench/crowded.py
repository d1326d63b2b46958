"""Cost of calls with more ranks than cores: `python bench/crowded.py`, in under a minute.

Ranks in separate processes on this host allreduce 8 B through shared memory, on all cores and on one core. Each call is
awaited before the next. The table has, for each world size, the microseconds per call, and of one rank the CPU time and
the number of context switches per call. Two more columns show the cost of so many processes on the machine:

- *warm*: repeated calls of a rank that is alone in its group;
- *cold*: the same call, with the core given to another process after each call, as ranks do when they take turns. The
  other processes evict a process's data from the caches, so Python takes many times as long.

This file is also the program of a rank: `crowded.py FOLDER RANK`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import mean, median
from time import perf_counter_ns

from machine import machine
from markdown import table

WORLD_SIZES = (2, 4, 8, 16, 32)
#: Number of calls per round, of all ranks together, and number of rounds. A figure is the median over the rounds.
CALLS, TURNS = 8_000, 3
#: Seconds until a rank counts as hung; a normal run takes a tenth of that.
LIMIT = 60


# -- one rank


async def measure(config: dict[str, object], rank: int) -> dict[str, list[list[float]]]:
    import numpy as np

    from aiocoll import GroupOptions, new_group

    world_size = int(str(config["world_size"]))
    options = GroupOptions(transport="shm", job_key=str(config["job_key"]))
    method = f"file://{Path.cwd()}"
    x = np.zeros(2, np.float32)
    figures: dict[str, list[list[float]]] = {"together": [], "warm": [], "cold": []}
    async with (
        new_group(init_method=f"{method}/store", rank=rank, world_size=world_size, options=options) as pg,
        new_group(init_method=f"{method}/alone.{rank}", rank=0, world_size=1, options=options) as alone,
    ):

        async def together() -> None:
            await pg.allreduce(x)

        async def warm() -> None:
            await alone.allreduce(x)

        async def cold() -> None:
            await alone.allreduce(x)
            os.sched_yield()

        for _ in range(TURNS):
            for call in (together, warm, cold):
                await pg.barrier()
                figures[call.__name__].append(await timed(call, CALLS // world_size))
    return figures


async def timed(call: Callable[[], Awaitable[None]], calls: int) -> list[float]:
    """Return the microseconds, the CPU microseconds and the context switches of this process per call."""
    for _ in range(calls // 4):
        await call()
    before, start = getrusage(RUSAGE_SELF), perf_counter_ns()
    for _ in range(calls):
        await call()
    passed, after = perf_counter_ns() - start, getrusage(RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    return [passed / calls / 1e3, used / calls * 1e6, switches / calls]


def run_rank(folder: str, rank: int) -> None:
    import uvloop

    os.chdir(folder)
    config = json.loads(Path("config").read_text())
    os.sched_setaffinity(0, config["cores"])
    Path(f"{rank}.json").write_text(json.dumps(uvloop.run(measure(config, rank))))


# -- all ranks


def launch(world_size: int, cores: list[int]) -> list[str]:
    """Measure `world_size` ranks on `cores` cores, and return the table row."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"world_size": world_size, "cores": cores, "job_key": secrets.token_hex(16)}
        Path(folder, "config").write_text(json.dumps(config))
        ranks = [subprocess.Popen([sys.executable, __file__, folder, str(rank)]) for rank in range(world_size)]
        try:
            for rank in ranks:
                if rank.wait(LIMIT):
                    raise SystemExit(f"{world_size} ranks: one of them failed; its error is above")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        figures = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]

    def of(what: str, column: int, over: Callable[[list[float]], float]) -> float:
        return median([over([each[what][turn][column] for each in figures]) for turn in range(TURNS)])

    return [
        f"{world_size} on {len(cores)}",
        f"{of('together', 0, max):,.1f}",
        f"{of('together', 1, mean):,.1f}",
        f"{of('together', 2, mean):.2f}",
        f"{of('warm', 1, mean):.1f}",
        f"{of('cold', 1, mean):.1f}",
    ]


def main() -> None:
    every = sorted(os.sched_getaffinity(0))
    places = [every] if len(every) == 1 else [every, every[:1]]
    rows = [launch(world_size, cores) for cores in places for world_size in WORLD_SIZES]
    print(machine(), "\n")
    print(table(["ranks on cores", "µs", "processor, each", "switches, each", "warm", "cold"], rows))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_rank(sys.argv[1], int(sys.argv[2]))
    else:
        main()
