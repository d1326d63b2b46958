"""Ranks that are killed during calls: the errors of the survivors, and the seconds until they are raised.

The program reads scenarios and runs each on its own processes. The victim reports the time just before it kills itself
during a call.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np

from aiocoll import GroupError, GroupOptions, GroupRevokedError, ProcessGroup, new_group
from aiocoll.algorithms.machine import SingleCopy
from tests.chaos.forked_ranks import LIMIT, Report, run_chosen, run_forked

from ..internals import comm_of

WORLD_SIZE = 4
#: Numbers of float64 elements. A small array is one message; a large one is many segments, which wait for a receiver.
SMALL, LARGE = 8, 131_072

TRANSPORTS = ("unix", "tcp", "shm")
#: The name of a transport: shared memory, with all large messages read in place.
SINGLE_COPY = "single copy"

Call = Callable[[ProcessGroup, int, int], Awaitable[Any]]


def ones_per_rank(pg: ProcessGroup, count: int) -> list[np.ndarray]:
    return [np.ones(count) for _ in range(pg.size())]


#: Every kind of collective, as a function of group, root and count.
CALLS: dict[str, Call] = {
    "allreduce": lambda pg, root, n: pg.allreduce(np.ones(n)),
    "reduce": lambda pg, root, n: pg.reduce(np.ones(n), root),
    "broadcast": lambda pg, root, n: pg.broadcast(np.ones(n), root),
    "allgather": lambda pg, root, n: pg.allgather(None, np.ones(n)),
    "gather": lambda pg, root, n: pg.gather(None, np.ones(n), root),
    "scatter": lambda pg, root, n: pg.scatter(np.empty(n), ones_per_rank(pg, n) if pg.rank() == root else None, root),
    "reduce_scatter": lambda pg, root, n: pg.reduce_scatter(np.empty(n), ones_per_rank(pg, n)),
    "alltoall": lambda pg, root, n: pg.alltoall(ones_per_rank(pg, n), ones_per_rank(pg, n)),
    "scan": lambda pg, root, n: pg.scan(np.ones(n)),
    "exscan": lambda pg, root, n: pg.exscan(np.ones(n)),
    "barrier": lambda pg, root, n: pg.barrier(),
    "allgather_object": lambda pg, root, n: pg.allgather_object(bytes(n)),
    "sendrecv": lambda pg, root, n: pass_around_ring(pg, n),
}


async def pass_around_ring(pg: ProcessGroup, count: int) -> None:
    sending = pg.send(np.ones(count), (pg.rank() + 1) % pg.size())
    await pg.recv(np.empty(count), (pg.rank() - 1) % pg.size())
    await sending


def scenarios() -> list[dict[str, Any]]:
    """Return every kind of call with every victim, on every transport, with small and large arrays."""
    every = itertools.product(CALLS, range(WORLD_SIZE), (*TRANSPORTS, SINGLE_COPY), (SMALL, LARGE))
    return [
        # `rounds`: the calls that succeed first; `turns`: the loop iterations before the victim dies.
        {"kind": kind, "victim": victim, "transport": transport, "count": count, "rounds": n % 5, "turns": n % 3}
        | {"root": (victim + n) % WORLD_SIZE}
        for n, (kind, victim, transport, count) in enumerate(every)
    ]


async def rank(scenario: dict[str, Any], number: int, port: int, report: Report) -> None:
    call, root, count = CALLS[scenario["kind"]], scenario["root"], scenario["count"]
    single_copy = scenario["transport"] == SINGLE_COPY
    group = new_group(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=number,
        world_size=WORLD_SIZE,
        timeout=30,
        options=GroupOptions(transport="shm" if single_copy else scenario["transport"], job_key=b"k" * 32),
    )
    async with group as pg:
        if single_copy:
            comm = comm_of(pg)
            comm.tuning = comm.tuning._replace(single_copy=SingleCopy(0, 0, 0))
        for _ in range(scenario["rounds"]):
            await call(pg, root, count)
        if number == scenario["victim"]:
            await pg.barrier()
            dying = asyncio.ensure_future(call(pg, root, count))
            for _ in range(scenario["turns"]):
                await asyncio.sleep(0)
            report({"killed": time.monotonic(), "done": dying.done()})
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await pg.barrier()
            while True:
                await call(pg, root, count)
        except GroupError as error:
            found = time.monotonic()
            first = error.__cause__ if isinstance(error, GroupRevokedError) else error
        await wait_for_control_link(pg)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    ranks, how = getattr(first, "ranks", None), getattr(first, "how", None)
    report({"rank": number, "at": found, "raised": type(first).__name__, "ranks": ranks, "how": how, "left": left})


async def wait_for_control_link(pg: ProcessGroup) -> None:
    """Wait until this rank has a control link to the hub, or to the next hub if the victim was the hub."""
    async with asyncio.timeout(LIMIT / 6):
        while not comm_of(pg).endpoint.control.links:  # noqa: ASYNC110
            await asyncio.sleep(0)


if __name__ == "__main__":
    run_chosen(scenarios(), lambda each: run_forked(WORLD_SIZE, partial(rank, each)))
