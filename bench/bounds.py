"""What a collective of two ranks takes at least: `python bench/bounds.py`, in under a minute.

Each rank calls, puts its own block in its place, if there is one, and reads once every byte of the other rank that its
result holds or is made of. So a bound is the sum of

- *call*: the cheapest awaited call there is, an allreduce in a group of one rank, which has nothing to do;
- *moved*: `np.copyto`, or `np.add` where it reduces, from memory that another process has filled and that both map, and
  `np.copyto` of the own block: in both processes at once where each rank has to, else in one. Arrays stay in whatever
  cache holds them;
- *told*: half a round trip of a flag that both poll.

It leaves out what else the ranks tell each other, plans of blocks, second copies, and turns of the loop. Medians; the
size is that of one rank's array, or of one block.
"""

from __future__ import annotations

import mmap
import secrets
import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import uvloop
from machine import machine
from markdown import ranks_of, size_of, table
from roofline import roofline, together

from aiocoll import GroupOptions, new_group

SIZES = (8, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20)
WORLD_SIZE = 2
#: Nanoseconds for each figure, and the repetitions that are timed at the least.
ENOUGH, LEAST = 300_000_000, 15


class Move(NamedTuple):
    """What has to be done with the bytes of one block: the other rank's added or copied, the own ones copied as well.

    Attributes:
        adds: the other rank's are added.
        each: both ranks have to do it, not one.
        own: besides, the own block is copied.
    """

    adds: bool
    each: bool
    own: bool = False


MOVES = {
    "allreduce": Move(adds=True, each=True),
    "broadcast": Move(adds=False, each=False),
    "reduce": Move(adds=True, each=False),
    "allgather": Move(adds=False, each=True, own=True),
    "reduce_scatter": Move(adds=True, each=True),
    "alltoall": Move(adds=False, each=True, own=True),
    "gather": Move(adds=False, each=False, own=True),
    "scatter": Move(adds=False, each=False),
    "scan": Move(adds=True, each=False),
}


async def calling() -> float:
    """Return the microseconds of the cheapest awaited call."""
    x = np.zeros(2, np.float32)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        options = GroupOptions(transport="shm", job_key=secrets.token_hex(16))
        async with new_group(init_method=f"file://{folder}/store", rank=0, world_size=1, options=options) as pg:
            end = perf_counter_ns() + ENOUGH
            while (start := perf_counter_ns()) < end:
                await pg.allreduce(x)
                taken.append(perf_counter_ns() - start)
    return median(taken) / 1e3


def moving(move: Move, nbytes: int) -> float:
    """Return the microseconds that it takes the slower process."""
    written = [np.frombuffer(mmap.mmap(-1, nbytes), np.float32) for _ in range(WORLD_SIZE)]

    def role(rank: int) -> Callable[[Callable[[], None]], float]:
        def run(meet: Callable[[], None]) -> float:
            written[rank][:] = rank
            result, own, place = (np.zeros(nbytes // 4, np.float32) for _ in range(3))
            meet()
            return repeated(move, result, written[1 - rank], own, place) if move.each or rank == 0 else 0.0

        return run

    return max(together([role(rank) for rank in range(WORLD_SIZE)]))


def repeated(move: Move, result: Any, theirs: Any, own: Any, place: Any) -> float:
    taken: list[int] = []
    end = perf_counter_ns() + ENOUGH
    while (start := perf_counter_ns()) < end or len(taken) < LEAST:
        if move.adds:
            np.add(result, theirs, result)
        else:
            np.copyto(result, theirs)
        if move.own:
            np.copyto(place, own)
        taken.append(perf_counter_ns() - start)
    return median(taken) / 1e3


def main() -> None:
    told = roofline(WORLD_SIZE, 0.5).flag * 1e6 / 2
    moved = {(move, nbytes): moving(move, nbytes) for move in dict.fromkeys(MOVES.values()) for nbytes in SIZES}
    call = uvloop.run(calling())
    print(machine(), f"\n### {ranks_of(WORLD_SIZE)}: µs, {call:.1f} for the call and {told:.1f} to be told\n", sep="\n")
    rows = []
    for kind, move in MOVES.items():
        bounds = (call + moved[move, nbytes] + told for nbytes in SIZES)
        rows.append((kind, *(f"{bound:,.1f}" for bound in bounds)))
    print(table(("collective", *map(size_of, SIZES)), rows))


if __name__ == "__main__":
    main()
