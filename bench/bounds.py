"""Measured lower bounds for the time of collectives with 2 and 4 ranks: `python bench/bounds.py`, in a minute.

Each rank makes its call, copies its own block if the result has it, and reads every byte of other ranks that its result
needs once. So a bound is the sum of

- *call*: the time of the cheapest awaited call, an allreduce in a group of one rank, which has no work;
- *moved*: `np.copyto`, or `np.add` for reductions, from shared memory that another process has filled, and `np.copyto`
  of the own block. All processes that take part move data at once. Arrays stay in the cache that holds them. In an
  allreduce each rank adds its part of the others' arrays, and copies the other parts;
- *notified*: half a round trip of a flag that both ranks poll.

A bound excludes all other messages between ranks, plans of blocks, second copies, and turns of the loop. Figures are
medians. The size is that of one rank's array, or of one block.
"""

from __future__ import annotations

import itertools
import mmap
import secrets
import tempfile
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import numpy as np
import uvloop
from machine import machine
from markdown import ranks_of, size_of, table
from roofline import roofline, run_together

from aiocoll import GroupOptions, new_group

SIZES = (8, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20)
WORLD_SIZES = (2, 4)
#: Nanoseconds of measurement per figure, and minimum number of timed repetitions.
ENOUGH, LEAST = 300_000_000, 15


class Move(NamedTuple):
    """The data that ranks must move in a collective.

    Attributes:
        movers: the ranks that move data: "each", "root", or "others", which are all but the root.
        adds, copies: number of other ranks of which a rank adds, or copies, a whole block: "all", "one", or "none";
            "parts" means one part of each rank's block, with as many parts as ranks.
        own: whether they also copy their own block.
    """

    movers: Literal["each", "root", "others"]
    adds: Literal["all", "one", "parts", "none"] = "none"
    copies: Literal["all", "one", "parts", "none"] = "none"
    own: bool = False


MOVES = {
    "allreduce": Move("each", adds="parts", copies="parts"),
    "broadcast": Move("others", copies="one"),
    "reduce": Move("root", adds="all"),
    "allgather": Move("each", copies="all", own=True),
    "reduce_scatter": Move("each", adds="all"),
    "alltoall": Move("each", copies="all", own=True),
    "gather": Move("root", copies="all", own=True),
    "scatter": Move("others", copies="one"),
    "scan": Move("others", adds="one"),
}


async def measure_call() -> float:
    """Return the median microseconds of the cheapest awaited call: an allreduce of a group with one rank."""
    x = np.zeros(2, np.float32)
    passed = []
    with tempfile.TemporaryDirectory() as folder:
        options = GroupOptions(transport="shm", job_key=secrets.token_hex(16))
        async with new_group(init_method=f"file://{folder}/store", rank=0, world_size=1, options=options) as pg:
            end = perf_counter_ns() + ENOUGH
            while (start := perf_counter_ns()) < end:
                await pg.allreduce(x)
                passed.append(perf_counter_ns() - start)
    return median(passed) / 1e3


def measure_move(move: Move, nbytes: int, world_size: int) -> float:
    """Return the microseconds in which the slowest process reads, adds and copies the data of a collective."""
    written = [np.frombuffer(mmap.mmap(-1, nbytes), np.float32) for _ in range(world_size)]

    def role(rank: int) -> Callable[[Callable[[], None]], float]:
        def run(meet: Callable[[], None]) -> float:
            written[rank][:] = rank
            own = np.zeros(nbytes // 4, np.float32)
            others = [each for number, each in enumerate(written) if number != rank]
            adds, copies = (blocks_to_read(others, how) for how in (move.adds, move.copies))
            copies += [own] if move.own else []
            places = [np.zeros_like(each) for each in copies]
            meet()
            has_to = move.movers == "each" or (move.movers == "root") == (rank == 0)
            return time_move(adds, copies, places) if has_to else 0.0

        return run

    return max(run_together([role(rank) for rank in range(world_size)]))


def blocks_to_read(others: Sequence[Any], how: str) -> list[Any]:
    """Return the blocks of other ranks, or the parts of their blocks, that a rank reads."""
    if how == "parts":
        return [each[: max(1, len(each) // (len(others) + 1))] for each in others]
    return list(others[: {"all": len(others), "one": 1, "none": 0}[how]])


def time_move(adds: Sequence[Any], copies: Sequence[Any], places: Sequence[Any]) -> float:
    total = np.zeros_like(adds[0]) if adds else None
    passed: list[int] = []
    end = perf_counter_ns() + ENOUGH
    while (start := perf_counter_ns()) < end or len(passed) < LEAST:
        for each in adds:
            np.add(total, each, total)
        for place, each in zip(places, copies, strict=True):
            np.copyto(place, each)
        passed.append(perf_counter_ns() - start)
    return median(passed) / 1e3


def main() -> None:
    notified = {world_size: roofline(world_size, 0.5).flag * 1e6 / 2 for world_size in WORLD_SIZES}
    moves = dict.fromkeys(MOVES.values())
    moved = {each: measure_move(*each) for each in itertools.product(moves, SIZES, WORLD_SIZES)}
    call = uvloop.run(measure_call())
    print(machine())
    for world_size, notification in notified.items():
        parts = f"{call:.1f} for the call and {notification:.1f} for the notification"
        print(f"\n### {ranks_of(world_size)}: µs, {parts}\n")
        rows = [
            (kind, *(f"{call + moved[move, nbytes, world_size] + notification:,.1f}" for nbytes in SIZES))
            for kind, move in MOVES.items()
        ]
        print(table(("collective", *map(size_of, SIZES)), rows))


if __name__ == "__main__":
    main()
