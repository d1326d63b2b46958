"""A rank as a user would start one: meet the others, make every call, end. Arguments: what to do, its rendezvous."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import aiocoll
from tests.testing.every import every_call

#: Bytes of an allreduce that takes many turns of the loop on every transport.
LARGE = 8 * 1024 * 1024
#: Times the ranks meet and part in one run of `meet`.
MEETINGS = 8


def held() -> tuple[set[str], list[str]]:
    """Return the files and threads of this process."""
    fds = Path("/proc/self/fd")
    files = {f"{fd} {os.readlink(fds / fd)}" for fd in os.listdir(fds) if (fds / fd).is_symlink()}
    return files, [thread.name for thread in threading.enumerate()]


async def every(pg: aiocoll.ProcessGroup) -> Any:
    """Make every call, in a second group of the same ranks too."""
    async with aiocoll.new_group(**where()) as second:
        counts = await every_call(second, (1, 1000))
    return counts + await every_call(pg, (17, 70_000))


def bequeath(seconds: str) -> subprocess.Popen[bytes]:
    """Start a child that holds all connections of this process, so that they do not break when it dies."""
    fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(["sleep", seconds], pass_fds=[fd for fd in fds if fd > 2], **silent)


async def large(pg: aiocoll.ProcessGroup) -> Any:
    """Return an array; with `EMPTY` one that its right neighbour has mapped."""
    array = np.ones(LARGE // 8)
    if "EMPTY" in os.environ:
        array = await pg.empty(LARGE // 8, np.float64)
        for _ in range(3):
            array[:] = 1
            await pg.allreduce(array)
        array[:] = 1
    return array


async def lose(pg: aiocoll.ProcessGroup) -> Any:
    """Rank `VICTIM` dies in the middle of an allreduce."""
    array = await large(pg)
    if pg.rank() == int(os.environ["VICTIM"]):
        await all_others(pg)
        pg.allreduce(array)
        heir = bequeath(os.environ["HEIR"]) if "HEIR" in os.environ else None  # noqa: F841 - it warns when forgotten
        os.kill(os.getpid(), signal.SIGKILL)
    return await failure(pg, array)


async def leave(pg: aiocoll.ProcessGroup) -> Any:
    """Rank `VICTIM` goes home early."""
    if pg.rank() == int(os.environ["VICTIM"]):
        await all_others(pg)
        return "left"
    return await failure(pg, np.ones(LARGE // 8))


async def all_others(pg: aiocoll.ProcessGroup) -> None:
    """Wait until they have entered the allreduce."""
    for _ in range(pg.size() - 1):
        await pg.recv_object()


async def failure(pg: aiocoll.ProcessGroup, array: Any) -> Any:
    """Enter an allreduce; return how it failed, and how the next call did."""
    work = pg.allreduce(array)
    await pg.send_object("entered", int(os.environ["VICTIM"]))
    try:
        await work
    except aiocoll.PeerLostError as error:
        told = [type(error).__name__, error.how, list(error.ranks), str(error)]
    try:
        pg.barrier()
    except aiocoll.GroupRevokedError as error:
        return [*told, type(error.__cause__).__name__]
    return told


async def recover(pg: aiocoll.ProcessGroup) -> Any:
    """Lose rank `VICTIM`, go on without it, then with a newcomer; return how long it took to go on."""
    if pg.rank() == int(os.environ["VICTIM"]):
        return await lose(pg)
    array = await large(pg)
    await failure(pg, array)
    start = time.perf_counter()
    async with await pg.shrink() as small:
        took = time.perf_counter() - start
        assert await check(small) == pg.size() - 1
        array[:] = 1
        assert np.all(await small.allreduce(array) == small.size())
        await pg.shutdown()
        async with await small.grow(1) as grown:
            assert grown.rank() == small.rank()
            return [took, await check(grown)]


async def alone(pg: aiocoll.ProcessGroup) -> Any:
    """Lose rank `VICTIM`; return how, and how many go on at once."""
    if pg.rank() == int(os.environ["VICTIM"]):
        return await lose(pg)
    _, how, *_ = await failure(pg, await large(pg))
    start = time.perf_counter()
    async with await pg.shrink() as small:
        return how, await check(small), time.perf_counter() - start


async def lose_growing(pg: aiocoll.ProcessGroup) -> Any:
    """Rank `VICTIM` dies while the group waits for newcomers; return when and how the others hear of it."""
    growing = asyncio.ensure_future(pg.grow(1))
    if pg.rank() == int(os.environ["VICTIM"]):
        # Rank 0 has told all others how many are to come, and the others wait to hear where.
        while not any(each.op == "BROADCAST_OBJECT" for each in pg.pending()) and pg.rank():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for rank in {*range(pg.size())} - {pg.rank()}:
            await pg.send_object("about to die", rank)
        await all_others(pg)
        os.kill(os.getpid(), signal.SIGKILL)
    victim = int(os.environ["VICTIM"])
    await pg.recv_object(victim)
    await pg.send_object("waiting", victim)
    start = time.perf_counter()
    try:
        await growing
    except aiocoll.PeerLostError as error:
        told = [time.perf_counter() - start, error.how, list(error.ranks)]
    async with await pg.shrink() as small:
        return [*told, await check(small)]


async def replace(pg: aiocoll.ProcessGroup) -> Any:
    """Rank `VICTIM` is stopped and excluded, and a newcomer takes its place; return what each rank sees of it."""
    victim = int(os.environ["VICTIM"])
    if pg.rank() != victim:
        await pg.recv_object(victim)
        async with await pg.shrink(exclude=[victim]) as small, await small.grow(1) as grown:
            return await check(grown)
    for rank in {*range(pg.size())} - {victim}:
        await pg.send_object("about to stop", rank)
    os.kill(os.getpid(), signal.SIGSTOP)
    cause = await pg.wait_revoked()
    try:
        await pg.shrink()
    except aiocoll.GroupError as error:
        return [str(cause), str(error)]


async def join(pg: aiocoll.ProcessGroup) -> Any:
    """Take the place of a rank that was lost."""
    return await check(pg)


async def check(pg: aiocoll.ProcessGroup) -> int:
    """Return the number of ranks, if every one of them adds what it should."""
    tensor = np.full(LARGE // 8, 2.0 ** pg.rank())
    await pg.allreduce(tensor)
    assert (tensor == 2.0 ** pg.size() - 1).all()
    return pg.size()


def where() -> dict[str, Any]:
    """Return what the command line says about the rendezvous."""
    _, _, method, *numbers = sys.argv
    if sys.argv[1] == "join":
        return {"init_method": method, "join": True}
    return {"init_method": method, **dict(zip(("rank", "world_size"), map(int, numbers), strict=False))}


async def meet(pg: aiocoll.ProcessGroup) -> Any:
    """Do no more than meet."""
    return await pg.allreduce(1)


async def main() -> Any:
    what = {
        "every": every,
        "lose": lose,
        "lose_growing": lose_growing,
        "leave": leave,
        "meet": meet,
        "recover": recover,
        "alone": alone,
        "join": join,
        "replace": replace,
    }[sys.argv[1]]
    for _ in range(MEETINGS if what is meet else 1):
        async with aiocoll.new_group(**where()) as pg:
            result = await what(pg)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left
    return {"rank": pg.rank(), "size": pg.size(), "result": result}


if __name__ == "__main__":
    before = held()
    outcome = asyncio.run(main())
    if "EMPTY" in os.environ:
        gc.collect()  # the error of the call that failed, and with it the array
    files, threads = held()
    assert files <= before[0], files - before[0]
    assert threads == before[1]
    # In one piece: the ranks may share their output.
    os.write(1, json.dumps(outcome).encode() + b"\n")
