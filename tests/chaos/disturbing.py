"""Kills, stops, cancels or aborts ranks at random moments of calls of every size, and checks every result.

Reads scenarios, runs each on processes of its own, and writes how each rank ended. Ranks make the same calls in the
same order. A rank overwrites an array as soon as its call has ended, so a peer that still read it would return a wrong
result. Another process kills and stops: its moments fall also between two instructions of the accelerator.
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
from tests.chaos.forked import Said, Say, run_chosen, run_forked

#: What happens to the victim, or what it does.
WHAT = ("kill", "stop", "cancel", "abort")
WORLD_SIZES = (2, 3)
#: Elements of float64: in slots; in few chunks and in many; read in place.
COUNTS = (3, 9_000, 20_000, 70_000, 131_072, 200_001, 600_000)
#: Calls until ranks end that nothing ends.
CALLS = 60
#: Seconds after the start at which a victim is disturbed, at most.
LATEST = 0.25
#: Of the stops of a victim: how many, and the seconds of each.
STOPS, STOPPED = 4, 0.05
#: What arrays are overwritten with.
SPOILED = -7.0

Array = np.ndarray[Any, np.dtype[np.float64]]


def scenarios() -> list[dict[str, Any]]:
    """Return 400 runs: each disturbance of each rank, at moments that differ."""
    every = itertools.islice(itertools.cycle(itertools.product(WHAT, WORLD_SIZES)), 400)
    return [
        {"what": what, "world": world, "victim": number // len(WHAT) % world, "seed": number}
        for number, (what, world) in enumerate(every)
    ]


# -- calls that check their results


def value(rank: int, step: int) -> float:
    """Return what all elements of a rank's array have before a call."""
    return float(rank + 1 + step)


def total(pg: ProcessGroup, step: int) -> float:
    """Return the sum of the values of all ranks."""
    return pg.size() * (pg.size() + 1) / 2 + pg.size() * step


def own(pg: ProcessGroup, count: int, step: int) -> Array:
    """Return this rank's array."""
    return np.full(count, value(pg.rank(), step))


def check(array: Array, expected: float) -> None:
    """Raise an error unless all elements have this value; then overwrite them."""
    if not (array == expected).all():
        wrong = array[array != expected]
        raise AssertionError(f"{wrong.size} of {array.size} elements are wrong, such as {wrong[0]}, not {expected}")
    array.fill(SPOILED)


def blocks_of(pg: ProcessGroup, array: Array) -> Sequence[Array]:
    """Return the part of each rank."""
    return np.split(array, pg.size())


async def allreduce(pg: ProcessGroup, count: int, step: int) -> None:
    array = own(pg, count, step)
    await pg.allreduce(array)
    check(array, total(pg, step))


async def several(pg: ProcessGroup, count: int, step: int) -> None:
    arrays = [own(pg, count, step) for _ in range(4)]
    works = [pg.allreduce(array) for array in arrays]
    for work, array in zip(works, arrays, strict=True):
        await work
        check(array, total(pg, step))


async def broadcast(pg: ProcessGroup, count: int, step: int) -> None:
    root, array = step % pg.size(), own(pg, count, step)
    await pg.broadcast(array, root)
    check(array, value(root, step))


async def reduce(pg: ProcessGroup, count: int, step: int) -> None:
    root, array = step % pg.size(), own(pg, count, step)
    await pg.reduce(array, root)
    check(array, total(pg, step) if pg.rank() == root else value(pg.rank(), step))


async def scan(pg: ProcessGroup, count: int, step: int) -> None:
    array, rank = own(pg, count, step), pg.rank()
    await pg.scan(array)
    check(array, (rank + 1) * (rank + 2) / 2 + (rank + 1) * step)


async def allgather(pg: ProcessGroup, count: int, step: int) -> None:
    array, whole = own(pg, count, step), np.zeros(count * pg.size())
    await pg.allgather_into_tensor(whole, array)
    array.fill(SPOILED)
    for rank, block in enumerate(blocks_of(pg, whole)):
        check(block, value(rank, step))


async def gather(pg: ProcessGroup, count: int, step: int) -> None:
    root, array = step % pg.size(), own(pg, count, step)
    outputs = [np.zeros(count) for _ in range(pg.size())] if pg.rank() == root else None
    await pg.gather(outputs, array, root)
    array.fill(SPOILED)
    for rank, block in enumerate(outputs or []):
        check(block, value(rank, step))


async def scatter(pg: ProcessGroup, count: int, step: int) -> None:
    root, output = step % pg.size(), np.zeros(count)
    inputs = [own(pg, count, step + rank) for rank in range(pg.size())] if pg.rank() == root else None
    await pg.scatter(output, inputs, root)
    for array in inputs or []:
        array.fill(SPOILED)
    check(output, value(root, step + pg.rank()))


async def reduce_scatter(pg: ProcessGroup, count: int, step: int) -> None:
    output, whole = np.zeros(count), own(pg, count * pg.size(), step)
    await pg.reduce_scatter_tensor(output, whole)
    whole.fill(SPOILED)
    check(output, total(pg, step))


async def alltoall(pg: ProcessGroup, count: int, step: int) -> None:
    received = np.zeros(count * pg.size())
    sent = np.concatenate([own(pg, count, step + rank) for rank in range(pg.size())])
    await pg.alltoall_base(received, sent)
    sent.fill(SPOILED)
    for rank, block in enumerate(blocks_of(pg, received)):
        check(block, value(rank, step + pg.rank()))


Call = Callable[[ProcessGroup, int, int], Awaitable[None]]
CALLED: tuple[Call, ...] = (
    *(allreduce, several, broadcast, reduce, scan, allgather),
    *(gather, scatter, reduce_scatter, alltoall),
)


# -- one rank


async def rank(scenario: dict[str, Any], number: int, port: int, say: Say) -> None:
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
        say({"pid": os.getpid(), "rank": number})
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
    say({"rank": number, "raised": type(raised).__name__, "lost": getattr(raised, "ranks", None), "steps": step})


async def abort(waiting: Awaitable[None], pg: ProcessGroup) -> None:
    """Abort the group in the middle of a call; its arrays are freed when the call has failed."""
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    pg.abort("for the test")
    await task


async def cancel(waiting: Awaitable[None], turns: int) -> None:
    """Cancel a task that waits for a call, some turns of the loop after the call; the call goes on."""
    task = asyncio.ensure_future(waiting)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


# -- the process that starts them


def disturb(scenario: dict[str, Any], pids: Sequence[int], said: Said) -> None:
    """Kill or stop the victim at its moment, once all ranks have a group."""
    what, world = scenario["what"], scenario["world"]
    if what not in ("kill", "stop") or [each for each in said if "raised" in each] or len(said) != world:
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
