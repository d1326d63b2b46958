"""Functions that the ranks of `test_trace` run, in a module that their processes can import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import numpy as np

from aiocoll import CollectiveMismatchError, CollectiveTimeoutError, ProcessGroup
from aiocoll.dump.files import file_name


async def train(pg: ProcessGroup, steps: int) -> None:
    """Make the calls of a typical training, with a different delay on each rank."""
    weights = np.zeros(3000)
    await pg.broadcast(weights, 0)
    for step in range(steps):
        await asyncio.sleep(0.002 * (1 + pg.rank() % 3))
        works = [pg.allreduce(np.zeros(50_000, np.float32), key=f"layer{layer}") for layer in range(2)]
        for work in works:
            await work
        await pg.allreduce(float(step))


async def hang(pg: ProcessGroup, steps: int, absent: int) -> int:
    """Let all ranks but one enter a barrier; return the line of the barrier, or of the last call of the absent rank."""
    await train(pg, steps)
    await pg.allgather_object(pg.rank())
    if pg.rank() == absent:
        line = sys._getframe().f_lineno - 2
        pending = pg.recv(np.zeros(3), 0, tag=5)
        await pg.send_object("waits", 0)
        await pg.wait_revoked()
        assert pending.exception() is not None
        return line
    if pg.rank() == 0:  # rank 0 starts its timeout when all other ranks have made their last calls
        for peer in range(1, pg.size()):
            await pg.recv_object(peer)
    work = pg.barrier(timeout=0.6 if pg.rank() == 0 else 60)
    line = sys._getframe().f_lineno - 1
    if pg.rank() != 0:
        await pg.send_object("waits", 0)
    try:
        await work
    except CollectiveTimeoutError:
        return line
    raise AssertionError("the barrier succeeded without the absent rank")


async def reduce_different_sizes(pg: ProcessGroup) -> None:
    """Let the last rank reduce a larger array than the other ranks, after these have made their calls."""
    await train(pg, 3)
    last = pg.size() - 1
    if pg.rank() == last:
        for peer in range(last):
            await pg.recv_object(peer)
    work = pg.allreduce(np.zeros(8 if pg.rank() == last else 7), timeout=20)
    if pg.rank() != last:
        await pg.send_object("called", last)
    try:
        await work
    except CollectiveMismatchError:
        return
    raise AssertionError("the allreduce of different sizes succeeded")


async def signal_each_other(pg: ProcessGroup, directory: str, blocked: bool) -> None:
    """Let each rank send SIGUSR2 to the next one, whose loop is free or blocked; the group stays usable."""
    await train(pg, 2)
    pids = await pg.allgather_object(os.getpid())
    os.kill(pids[(pg.rank() + 1) % pg.size()], signal.SIGUSR2)
    path = os.path.join(directory, file_name(pg.group_name, pg.rank()))
    deadline = time.monotonic() + 20
    while not os.path.exists(path):  # noqa: ASYNC240
        assert time.monotonic() < deadline
        if blocked:
            time.sleep(0.001)  # noqa: ASYNC251
        else:
            await asyncio.sleep(0.001)
    await pg.barrier()
