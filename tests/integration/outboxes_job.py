"""A rank of a job whose last rank does not read posts. Arguments: fate of the last rank; address, rank, world size.

The last rank is stopped for a while, is killed, or leaves. All other ranks print as JSON whether their results were
correct, and the number of contributions in their outboxes for several readers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import numpy as np

import aiocoll
from tests.internals import comm_of

_, what, address, rank, world_size = sys.argv
RANK, WORLD = int(rank), int(world_size)
LAST = WORLD - 1
#: The number of calls: more than an outbox has slots.
CALLS = 300
#: More calls than slots, but few enough to finish before the stopped rank counts as lost.
CALLS_WHILE_STOPPED = 150


def common_posts(pg: Any) -> int:
    shared = next(channel.shared for channel in comm_of(pg).channels if channel.shared is not None)
    return sum(shared.common_writer.posted)


async def reduce_all(pg: Any, times: int) -> bool:
    """Make `times` allreduces of arrays of different lengths; return whether all sums are correct."""
    right = True
    for number in range(times):
        tensor = np.full(1 + number % 1000, float(number))
        await pg.allreduce(tensor)
        right = right and bool((tensor == number * pg.size()).all())
    return right


async def stop(pg: Any) -> None:
    """Stop the last rank before it reads; the other ranks fill all slots, and finish calls in a separate group."""
    survivors = await pg.split_group(list(range(LAST)))
    pid = int(await pg.broadcast_object(os.getpid() if RANK == LAST else None, LAST))
    await pg.barrier()
    if RANK == 0:
        os.kill(pid, signal.SIGSTOP)
    if RANK == LAST:
        return print(json.dumps(await reduce_all(pg, CALLS)))
    works = []
    for number in range(CALLS):
        tensor = np.full(1 + number % 1000, float(number))
        works.append((number, tensor, pg.allreduce(tensor)))
    right = await reduce_all(survivors, CALLS_WHILE_STOPPED)
    early = not all(work.done() for _, _, work in works)
    await survivors.barrier()
    if RANK == 0:
        os.kill(pid, signal.SIGCONT)
    for number, tensor, work in works:
        await work
        right = right and bool((tensor == number * WORLD).all())
    before = common_posts(pg)
    right = right and await reduce_all(survivors, CALLS)
    print(json.dumps([right, early, common_posts(pg) - before]))
    await survivors.shutdown()


async def die(pg: Any) -> None:
    """Kill the last rank before it reads; the other ranks make a new group, whose calls use slots again."""
    if RANK == LAST:
        await pg.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await pg.barrier()  # the barrier may complete although the rank has died
        await reduce_all(pg, CALLS)
    except aiocoll.PeerLostError as error:
        lost = error.ranks
    except aiocoll.GroupRevokedError as error:  # the death was reported between two calls
        lost = error.__cause__.ranks
    group = await pg.shrink()
    before = common_posts(group)
    right = await reduce_all(group, CALLS)
    print(json.dumps([right, list(lost) == [LAST], common_posts(group) - before]))
    await group.shutdown()


async def leave(pg: Any) -> None:
    """Let the last rank leave right after its posts, which the other ranks read later."""
    if RANK == LAST:
        for number in range(CALLS):
            await pg.broadcast(np.full(4, float(number)), LAST)
        return print(json.dumps(True))
    await asyncio.sleep(0.5)  # lets the last rank leave first
    right = True
    for number in range(CALLS):
        tensor = np.zeros(4)
        await pg.broadcast(tensor, LAST)
        right = right and bool((tensor == number).all())
    print(json.dumps([right, True, 0]))


async def main() -> None:
    options = aiocoll.GroupOptions(transport="shm")
    async with aiocoll.new_group(init_method=address, rank=RANK, world_size=WORLD, options=options) as pg:
        await {"stop": stop, "die": die, "leave": leave}[what](pg)


asyncio.run(main())
