"""Ranks that are killed, stopped, cancelled or aborted at random moments of calls of every size.

The program reads scenarios, runs each on its own processes, and writes how each rank ended. Ranks make the same calls
in the same order. A rank overwrites an array as soon as its call has ended, so that a peer that still reads it returns
a wrong result. Another process kills and stops the victim, even between two instructions of the accelerator.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiocoll import GroupError, GroupOptions, GroupRevokedError, ProcessGroup, new_group
from tests.chaos.forked_ranks import Report, Reports, run_chosen, run_forked

#: Kinds of disturbances. Another process kills or stops the victim; the victim itself cancels or aborts.
WHAT = ("kill", "stop", "cancel", "abort")
WORLD_SIZES = (2, 3)
#: Numbers of float64 elements: sent in slots, in few chunks, in many chunks, or read in place.
COUNTS = (3, 9_000, 20_000, 70_000, 131_072, 200_001, 600_000)
#: The number of calls after which undisturbed ranks end.
CALLS = 60
#: Maximum number of seconds from the start to the disturbance.
LATEST = 0.25
#: Number of times that a victim is stopped, and the seconds of each stop.
STOPS, STOPPED = 4, 0.05
#: The value that overwrites arrays after each check.
SPOILED = -7.0

Array = np.ndarray[Any, np.dtype[np.float64]]


def scenarios() -> list[dict[str, Any]]:
    """Return 400 scenarios: each disturbance of each rank, at different moments."""
    every = itertools.islice(itertools.cycle(itertools.product(WHAT, WORLD_SIZES)), 400)
    return [
        {"what": what, "world": world, "victim": number // len(WHAT) % world, "seed": number}
        for number, (what, world) in enumerate(every)
    ]


# -- calls that check their results


def value(rank: int, step: int) -> float:
    """Return the value of all elements of a rank's array before a call."""
    return float(rank + 1 + step)


def total(pg: ProcessGroup, step: int) -> float:
    """Return the expected sum of the values of all ranks."""
    return pg.size() * (pg.size() + 1) / 2 + pg.size() * step


def own_array(pg: ProcessGroup, count: int, step: int) -> Array:
    """Return this rank's input array of a call: all elements have the value for rank and step."""
    return np.full(count, value(pg.rank(), step))


def check(array: Array, expected: float) -> None:
    """Raise an error unless all elements have the given value; then overwrite them."""
    if not (array == expected).all():
        wrong = array[array != expected]
        raise AssertionError(f"{wrong.size} of {array.size} elements are wrong, such as {wrong[0]}, not {expected}")
    array.fill(SPOILED)


def blocks_of(pg: ProcessGroup, array: Array) -> Sequence[Array]:
    """Split an array into one block per rank."""
    return np.split(array, pg.size())


async def allreduce(pg: ProcessGroup, count: int, step: int) -> None:
    array = own_array(pg, count, step)
    await pg.allreduce(array)
    check(array, total(pg, step))


async def several_allreduces(pg: ProcessGroup, count: int, step: int) -> None:
    arrays = [own_array(pg, count, step) for _ in range(4)]
    works = [pg.allreduce(array) for array in arrays]
    for work, array in zip(works, arrays, strict=True):
        await work
        check(array, total(pg, step))


async def broadcast(pg: ProcessGroup, count: int, step: int) -> None:
    root, array = step % pg.size(), own_array(pg, count, step)
    await pg.broadcast(array, root)
    check(array, value(root, step))


async def reduce(pg: ProcessGroup, count: int, step: int) -> None:
    root, array = step % pg.size(), own_array(pg, count, step)
    await pg.reduce(array, root)
    check(array, total(pg, step) if pg.rank() == root else value(pg.rank(), step))


async def scan(pg: ProcessGroup, count: int, step: int) -> None:
    array, rank = own_array(pg, count, step), pg.rank()
    await pg.scan(array)
    check(array, (rank + 1) * (rank + 2) / 2 + (rank + 1) * step)


async def allgather(pg: ProcessGroup, count: int, step: int) -> None:
    array, whole = own_array(pg, count, step), np.zeros(count * pg.size())
    await pg.allgather_into_tensor(whole, array)
    array.fill(SPOILED)
    for rank, block in enumerate(blocks_of(pg, whole)):
        check(block, value(rank, step))


async def gather(pg: ProcessGroup, count: int, step: int) -> None:
    root, array = step % pg.size(), own_array(pg, count, step)
    outputs = [np.zeros(count) for _ in range(pg.size())] if pg.rank() == root else None
    await pg.gather(outputs, array, root)
    array.fill(SPOILED)
    for rank, block in enumerate(outputs or []):
        check(block, value(rank, step))


async def scatter(pg: ProcessGroup, count: int, step: int) -> None:
    root, output = step % pg.size(), np.zeros(count)
    inputs = [own_array(pg, count, step + rank) for rank in range(pg.size())] if pg.rank() == root else None
    await pg.scatter(output, inputs, root)
    for array in inputs or []:
        array.fill(SPOILED)
    check(output, value(root, step + pg.rank()))


async def reduce_scatter(pg: ProcessGroup, count: int, step: int) -> None:
    output, whole = np.zeros(count), own_array(pg, count * pg.size(), step)
    await pg.reduce_scatter_tensor(output, whole)
    whole.fill(SPOILED)
    check(output, total(pg, step))


async def alltoall(pg: ProcessGroup, count: int, step: int) -> None:
    received = np.zeros(count * pg.size())
    sent = np.concatenate([own_array(pg, count, step + rank) for rank in range(pg.size())])
    await pg.alltoall_base(received, sent)
    sent.fill(SPOILED)
    for rank, block in enumerate(blocks_of(pg, received)):
        check(block, value(rank, step + pg.rank()))


Call = Callable[[ProcessGroup, int, int], Awaitable[None]]
CALLED: tuple[Call, ...] = (
    *(allreduce, several_allreduces, broadcast, reduce, scan, allgather),
    *(gather, scatter, reduce_scatter, alltoall),
)


# -- one rank


async def rank(scenario: dict[str, Any], number: int, port: int, report: Report) -> None:
    what, world = scenario["what"], scenario["world"]
    is_victim, chance = number == scenario["victim"], random.Random(scenario["seed"])
    group = new_group(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=number,
        world_size=world,
        timeout=30,
        options=GroupOptions(transport="shm", job_key=b"k" * 32),
    )
    async with group as pg:
        await pg.barrier()
        report({"pid": os.getpid(), "rank": number})
        moment = time.monotonic() + random.Random(-scenario["seed"]).uniform(0, LATEST)
        step, raised = 0, None
        try:
            while step < CALLS or what in ("kill", "abort"):
                call, count = chance.choice(CALLED), chance.choice(COUNTS)
                step += 1
                if is_victim and what == "abort" and time.monotonic() >= moment:
                    await abort(call(pg, count, step), pg)
                elif is_victim and what == "cancel" and not step % 4:
                    await cancel(call(pg, count, step), 1 + step % 3)
                else:
                    await call(pg, count, step)
        except GroupError as error:
            raised = error.__cause__ if isinstance(error, GroupRevokedError) else error
    report({"rank": number, "raised": type(raised).__name__, "lost": getattr(raised, "ranks", None), "steps": step})


async def abort(waiting: Awaitable[None], pg: ProcessGroup) -> None:
    """Abort the group during a call; free the arrays of the call as soon as the call has failed."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    pg.abort("for the test")
    await task


async def cancel(waiting: Awaitable[None], turns: int) -> None:
    """Cancel a task that waits for a call, some loop iterations after its start; the call continues."""
    task = asyncio.ensure_future(waiting)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


# -- the process that starts the ranks


def disturb(scenario: dict[str, Any], pids: Sequence[int], reports: Reports) -> None:
    """Kill or stop the victim at a random time after all ranks have a group."""
    what, world = scenario["what"], scenario["world"]
    if what not in ("kill", "stop") or [each for each in reports if "raised" in each] or len(reports) != world:
        return
    victim, moment = pids[scenario["victim"]], random.Random(scenario["seed"]).uniform(0, LATEST)
    time.sleep(moment)
    if what == "kill":
        os.kill(victim, signal.SIGKILL)
        return
    for _ in range(STOPS):
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(victim, signal.SIGCONT)
        time.sleep(STOPPED)


if __name__ == "__main__":
    run_chosen(
        scenarios(), lambda each: run_forked(each["world"], partial(rank, each), partial(disturb, each), collects=True)
    )
