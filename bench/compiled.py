"""What compiling saves: `python bench/compiled.py`, in under a minute, after half a minute in which it compiles.

Two ranks, processes on this host, allreduce through shared memory: of 8 B, each awaited before the next is called, and
1,000 of 4 KiB in one `coalescing()` block. Launches of the pure and of the compiled package take turns, in the same
environment, that of `make compiled`. What is compared are medians over the launches, of

- the awaited call on an undisturbed rank: the fastest tenth of a rank's own times, in which neither a peer that is late
  nor anything else on the machine has part;
- the awaited call: the median of what it takes the slower rank;
- a call in a block: the fastest block of the slower rank, by the number of its calls;
- what of that is no work of the block's own: the same arrays are copied together, reduced as one, and copied back.

This file is the rank, too: `compiled.py PACKAGE RANK`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-compiled"
PACKAGES = ("pure", "compiled")
WORLD_SIZE = 2
#: Awaited calls, and blocks of so many calls; some of each come before, to warm up.
AWAITED, BLOCKS, CALLS, WARM = 20_000, 40, 1000, 4
#: Elements of float32 of a call in a block.
COUNT = 1024
LAUNCHES = 9
#: Seconds after which ranks have hung; they take a twentieth of it.
LIMIT = 60
KEY = "00" * 16

#: Nanoseconds of each awaited call, of each block, and of moving and reducing what is in one.
Times = tuple[list[int], list[int], list[int]]


# -- one rank


async def measure(rank: int) -> Times:
    import numpy as np

    from aiocoll import GroupOptions, new_group

    options = GroupOptions(transport="shm", job_key=KEY)
    method = f"file://{Path.cwd()}/store"
    x = np.zeros(2, np.float32)
    members = [np.zeros(COUNT, np.float32) for _ in range(CALLS)]
    together = np.zeros((CALLS, COUNT), np.float32)
    awaited, blocks, moves = [], [], []
    async with new_group(init_method=method, rank=rank, world_size=WORLD_SIZE, options=options) as pg:
        for _ in range(AWAITED + AWAITED // 10):
            start = perf_counter_ns()
            await pg.allreduce(x)
            awaited.append(perf_counter_ns() - start)
        for _ in range(WARM + BLOCKS):
            await pg.barrier()
            start = perf_counter_ns()
            async with pg.coalescing():
                for member in members:
                    pg.allreduce(member)
            blocks.append(perf_counter_ns() - start)
            await pg.barrier()
            start = perf_counter_ns()
            np.concatenate(members, out=together.reshape(-1))
            await pg.allreduce(together)
            for member, row in zip(members, together, strict=True):
                member[...] = row
            moves.append(perf_counter_ns() - start)
    return awaited[-AWAITED:], blocks[-BLOCKS:], moves[-BLOCKS:]


def be_rank(package: str, rank: int) -> None:
    import uvloop

    from aiocoll.work import COMPILED

    assert (package == "compiled") == COMPILED, "the other package runs"
    Path(f"{rank}.json").write_text(json.dumps(uvloop.run(measure(rank))))


# -- all of them


def launch(package: str) -> tuple[float, ...]:
    """Return the microseconds of one launch: undisturbed, awaited, of one call of a block, and of moving it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if package == "pure":
        environment["PYTHONPATH"] = str(ROOT)  # the sources, before what is installed
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).resolve()), package]
        processes = [subprocess.Popen([*command, str(rank)], cwd=folder, env=environment) for rank in range(WORLD_SIZE)]
        try:
            codes = [process.wait(LIMIT) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            sys.exit(f"a rank of the {package} package has failed")
        ranks: list[Times] = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    awaited, blocks, moves = zip(*ranks, strict=True)
    return (
        min(quantiles(each, n=10)[0] for each in awaited) / 1e3,
        median(map(max, zip(*awaited, strict=True))) / 1e3,
        min(map(max, zip(*blocks, strict=True))) / CALLS / 1e3,
        min(map(max, zip(*moves, strict=True))) / CALLS / 1e3,
    )


def rows(found: Mapping[str, Sequence[tuple[float, ...]]]) -> list[tuple[str, ...]]:
    """Return a line for each figure; a ratio is that of two launches that followed each other."""
    names = (
        "8 B awaited, undisturbed",
        "8 B awaited, 2 ranks",
        f"a call of a block of {CALLS:,} of 4 KiB",
        "of that: to move and reduce 4 KiB",
    )
    lines = []
    for number, name in enumerate(names):
        pure, compiled = ([each[number] for each in found[package]] for package in PACKAGES)
        ratios = [two / one for one, two in zip(pure, compiled, strict=True)]
        share = f"**{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append((name, f"{median(pure):.2f}", f"{median(compiled):.2f}", share))
    return lines


def main() -> None:
    from machine import machine
    from markdown import ranks_of, table

    subprocess.run(["make", "--silent", "-C", str(ROOT), f"{ENVIRONMENT.name}/installed"], check=True)
    found: dict[str, list[tuple[float, ...]]] = {package: [] for package in PACKAGES}
    for number in range(LAUNCHES):
        for package in PACKAGES[:: 1 if number % 2 else -1]:
            found[package].append(launch(package))
    print(machine(), f"\n### {ranks_of(WORLD_SIZE)}: µs per call\n", sep="\n")
    print(table(("what", "pure", "compiled", "compiled / pure"), rows(found)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_rank(sys.argv[1], int(sys.argv[2]))
    else:
        main()
