"""Time and memory of many ranks in one process: python bench/scale.py [-n 16 64 256 1024] [--groups 100].

Each world runs in a separate process, over memory. Each figure is for all ranks together, from the first start to the
last end. The peak is that of the whole process, including the interpreter and NumPy. The second table is for subgroups
of a world of 16 ranks: the time to split all of them off, and the time to use each once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
from time import perf_counter

import numpy as np
from machine import machine
from markdown import table

from aiocoll import ProcessGroup
from aiocoll.testing import run_ranks

#: Number of ranks of the world that is split into groups.
SPLIT = 16
#: Seconds until a world counts as hung.
HUNG = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of many ranks in one process.")
    parser.add_argument("-n", type=int, nargs="+", default=[16, 64, 256, 1024], metavar="RANKS", help="world sizes")
    parser.add_argument("--groups", type=int, default=100, help="sub-groups (default: 100)")
    parser.add_argument("--only", choices=("world", "groups"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.n) < 1 or args.groups < 1:
        parser.error("-n and --groups: give positive numbers")
    if args.only:
        found = asyncio.run(world(args.n[0]) if args.only == "world" else groups(args.groups))
        print(json.dumps(found))
        return
    print("# Scale: many ranks in one process\n", machine(), "", sep="\n", flush=True)
    rows = [[size, *measure("world", size, args.groups)] for size in args.n]
    print(table(["ranks", "form, s", "allreduce, s", "again, s", "barrier, s", "close, s", "peak, MiB"], rows))
    split, use, files = measure("groups", SPLIT, args.groups)
    print(
        f"\n{args.groups} sub-groups of {SPLIT} ranks, on every rank: split off in {split} s, "
        f"an allreduce in each of them {use} s, {files} more open files"
    )


def measure(what: str, size: int, count: int) -> list[str]:
    command = [sys.executable, __file__, "--only", what, "-n", str(size), "--groups", str(count)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in json.loads(done.stdout)]


async def world(size: int) -> list[float]:
    """Form a world in this process; return the seconds of each step, and the peak memory in MiB."""
    ended = [0.0] * 5

    async def rank(pg: ProcessGroup) -> None:
        ended[0] = perf_counter()
        # The first call opens the links that it needs. The second call uses the open links.
        for step in (1, 2):
            x = np.full(4, 1.0)
            await pg.allreduce(x)
            assert (x == size).all()
            ended[step] = perf_counter()
        await pg.barrier()
        ended[3] = perf_counter()

    began = perf_counter()
    await run_ranks(size, rank, timeout=HUNG)
    ended[4] = perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [*(after - before for before, after in zip([began, *ended], ended, strict=False)), peak]


async def groups(count: int) -> list[float]:
    """Let each rank make and use `count` groups; return the seconds to make and to use them, and the opened files."""
    split, used, opened = 0.0, [0.0, 0.0], 0

    async def rank(pg: ProcessGroup) -> None:
        nonlocal split, opened
        await pg.allreduce(np.ones(4))
        await pg.barrier()
        files = len(os.listdir("/proc/self/fd"))
        began = perf_counter()
        # Await the groups later, so that each rank makes all its groups without interruption, and the times add up.
        works = [pg.split_group(range(SPLIT)) for _ in range(count)]
        split += perf_counter() - began
        await pg.barrier()
        used[0] = used[0] or perf_counter()
        for work in works:
            group = await work
            assert group is not None
            await group.allreduce(np.ones(4))
        used[1] = perf_counter()
        opened = max(opened, len(os.listdir("/proc/self/fd")) - files)

    await run_ranks(SPLIT, rank, timeout=HUNG)
    return [split, used[1] - used[0], opened]


if __name__ == "__main__":
    main()
