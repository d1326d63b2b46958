"""Ranks that pause at critical moments: between data and the flag that announces it, and around polls before sleep."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import numpy as np

from aiocoll import ProcessGroup
from aiocoll.transport.shm import transport
from aiocoll.transport.shm.fence import Fences, fences

from ..internals import comm_of

#: Numbers of float64 elements that fit the line of a slot, slots of both sizes, and chunks of a queue.
COUNTS = (1, 2, 5, 6, 17, 100, 511, 513, 3000, 40_000)
#: The environment variable with the seed of a rank's random pauses.
SEED = "PAUSES_SEED"
#: The relative frequencies of the counts in `COUNTS`.
WEIGHTS = (8, 8, 8, 8, 8, 8, 4, 4, 2, 1)

#: The number of pauses that this process has made so far.
pauses = 0


def pausing(chance: random.Random) -> Fences:
    """Return the memory fences of this machine, with random pauses around them.

    The fences stand wherever one side could see half of the other side's work. `order` stands between payload, entry
    and stamp. `full` stands between the stamp and the bell, between a read and its notice, and between the number of a
    sleep and the last poll before it.
    """
    known = fences()
    assert known is not None
    order, full = known

    def pause() -> None:
        global pauses
        number = chance.random()
        pauses += number < 1 / 16
        if number < 1 / 16:
            os.sched_yield()
        if number < 1 / 512:
            time.sleep(chance.random() * 300e-6)

    def paused_order() -> None:
        pause()
        if order is not None:
            order()
        pause()

    def paused_full() -> None:
        pause()
        full()
        pause()

    return Fences(paused_order, paused_full)


async def sums(pg: ProcessGroup, operations: int) -> int:
    """Reduce at least `operations` arrays, one at a time or several at once; return their number."""
    rank, size = pg.rank(), pg.size()
    same, own = random.Random(1), random.Random(rank)
    done = 0
    while done < operations:
        batch = same.choice((1, 1, 1, 2, 5))
        counts = same.choices(COUNTS, WEIGHTS, k=batch)
        tensors = [np.arange(count, dtype="f8") + (done + number) * (rank + 1) for number, count in enumerate(counts)]
        works = [pg.allreduce(tensor, timeout=30) for tensor in tensors]
        if own.random() < 1 / 16:
            await asyncio.sleep(0)
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            await work
            expected = size * np.arange(len(tensor)) + (done + number) * (size * (size + 1) // 2)
            if not (tensor == expected).all():
                raise AssertionError(f"operation {done + number} on rank {rank}: {tensor} instead of {expected}")
        done += batch
    return done


async def soak(pg: ProcessGroup, operations: int) -> Any:
    """Check many sums; return their number, the media of the links, and whether there were enough pauses."""
    done = await sums(pg, operations)
    carriers = {channel.link.carrier for channel in comm_of(pg).channels if channel.link is not None}
    return done, sorted(carriers), pauses > operations // 10


# Insert the pauses on import, which happens in a rank's process before the rank has any link.
if SEED in os.environ:
    transport.fences = lambda: pausing(random.Random(f"{os.environ[SEED]} {os.environ['RANK']}"))
