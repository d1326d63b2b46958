"""A rank that meets the other ranks, makes calls and ends. Arguments: action, init method, rank and world size."""

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
from tests.testing.all_calls import make_all_calls

#: The size in bytes of an array whose allreduce takes many loop iterations on every transport.
LARGE = 8 * 1024 * 1024
#: The number of meetings in one run of the action "meet".
MEETINGS = 8


def open_files_and_threads() -> tuple[set[str], list[str]]:
    """Return the open files and the threads of this process."""
    fds = Path("/proc/self/fd")
    files = {f"{fd} {os.readlink(fds / fd)}" for fd in os.listdir(fds) if (fds / fd).is_symlink()}
    return files, [thread.name for thread in threading.enumerate()]


async def make_every_call(pg: aiocoll.ProcessGroup) -> Any:
    """Make calls of every kind in the group and in a second group of the same ranks."""
    async with aiocoll.new_group(**rendezvous_arguments()) as second:
        counts = await make_all_calls(second, (1, 1000))
    return counts + await make_all_calls(pg, (17, 70_000))


def start_heir(seconds: str) -> subprocess.Popen[bytes]:
    """Start a child process that inherits all connections of this process, and keeps them open after its death."""
    fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(["sleep", seconds], pass_fds=[fd for fd in fds if fd > 2], **silent)


async def large_array(pg: aiocoll.ProcessGroup) -> Any:
    """Return a large array; if `EMPTY` is in the environment, an array of `pg.empty` that the neighbour has mapped."""
    array = np.ones(LARGE // 8)
    if "EMPTY" in os.environ:
        array = await pg.empty(LARGE // 8, np.float64)
        for _ in range(3):
            array[:] = 1
            await pg.allreduce(array)
        array[:] = 1
    return array


async def lose_rank(pg: aiocoll.ProcessGroup) -> Any:
    """Kill rank `VICTIM` during an allreduce; return the failure report of this call on the other ranks."""
    array = await large_array(pg)
    if pg.rank() == int(os.environ["VICTIM"]):
        await wait_for_all_others(pg)
        pg.allreduce(array)
        heir = start_heir(os.environ["HEIR"]) if "HEIR" in os.environ else None  # noqa: F841 - Popen warns when it is deleted
        os.kill(os.getpid(), signal.SIGKILL)
    return await failed_calls(pg, array)


async def leave_early(pg: aiocoll.ProcessGroup) -> Any:
    """Let rank `VICTIM` leave before an allreduce; return the failure report of this call on the other ranks."""
    if pg.rank() == int(os.environ["VICTIM"]):
        await wait_for_all_others(pg)
        return "left"
    return await failed_calls(pg, np.ones(LARGE // 8))


async def wait_for_all_others(pg: aiocoll.ProcessGroup) -> None:
    """Wait until all other ranks have entered the allreduce."""
    for _ in range(pg.size() - 1):
        await pg.recv_object()


async def failed_calls(pg: aiocoll.ProcessGroup, array: Any) -> Any:
    """Make an allreduce that fails; return the failure report of the allreduce and of the next call."""
    work = pg.allreduce(array)
    await pg.send_object("entered", int(os.environ["VICTIM"]))
    try:
        await work
    except aiocoll.PeerLostError as error:
        report = [type(error).__name__, error.how, list(error.ranks), str(error)]
    try:
        pg.barrier()
    except aiocoll.GroupRevokedError as error:
        return [*report, type(error.__cause__).__name__]
    return report


async def recover(pg: aiocoll.ProcessGroup) -> Any:
    """Kill rank `VICTIM`, shrink the group, grow it by a newcomer; return the seconds of the shrink, and the size."""
    if pg.rank() == int(os.environ["VICTIM"]):
        return await lose_rank(pg)
    array = await large_array(pg)
    await failed_calls(pg, array)
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


async def continue_alone(pg: aiocoll.ProcessGroup) -> Any:
    """Kill rank `VICTIM` and shrink the group; return the kind of loss, the new size, and the seconds of the shrink."""
    if pg.rank() == int(os.environ["VICTIM"]):
        return await lose_rank(pg)
    _, how, *_ = await failed_calls(pg, await large_array(pg))
    start = time.perf_counter()
    async with await pg.shrink() as small:
        return how, await check(small), time.perf_counter() - start


async def lose_growing(pg: aiocoll.ProcessGroup) -> Any:
    """Kill rank `VICTIM` while the group waits for newcomers; return the delay and content of the failure notice."""
    growing = asyncio.ensure_future(pg.grow(1))
    if pg.rank() == int(os.environ["VICTIM"]):
        # Wait until `grow` has exchanged the number of newcomers, and the ranks wait for the newcomers' addresses.
        while not any(each.op == "BROADCAST_OBJECT" for each in pg.pending()) and pg.rank():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for rank in {*range(pg.size())} - {pg.rank()}:
            await pg.send_object("about to die", rank)
        await wait_for_all_others(pg)
        os.kill(os.getpid(), signal.SIGKILL)
    victim = int(os.environ["VICTIM"])
    await pg.recv_object(victim)
    await pg.send_object("waiting", victim)
    start = time.perf_counter()
    try:
        await growing
    except aiocoll.PeerLostError as error:
        report = [time.perf_counter() - start, error.how, list(error.ranks)]
    async with await pg.shrink() as small:
        return [*report, await check(small)]


async def replace_rank(pg: aiocoll.ProcessGroup) -> Any:
    """Stop and exclude rank `VICTIM`, and replace it by a newcomer; return the size of the group, or the errors."""
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
    """Check the group that this process has joined as a newcomer in place of a lost rank."""
    return await check(pg)


async def check(pg: aiocoll.ProcessGroup) -> int:
    """Return the number of ranks; fail unless a sum over all ranks is correct."""
    tensor = np.full(LARGE // 8, 2.0 ** pg.rank())
    await pg.allreduce(tensor)
    assert (tensor == 2.0 ** pg.size() - 1).all()
    return pg.size()


def rendezvous_arguments() -> dict[str, Any]:
    """Return the arguments for `new_group` from the command line."""
    _, _, method, *numbers = sys.argv
    if sys.argv[1] == "join":
        return {"init_method": method, "join": True}
    return {"init_method": method, **dict(zip(("rank", "world_size"), map(int, numbers), strict=False))}


async def meet(pg: aiocoll.ProcessGroup) -> Any:
    """Make one call; `main` has already met the other ranks."""
    return await pg.allreduce(1)


async def main() -> Any:
    action = {
        "every": make_every_call,
        "lose": lose_rank,
        "lose_growing": lose_growing,
        "leave": leave_early,
        "meet": meet,
        "recover": recover,
        "alone": continue_alone,
        "join": join,
        "replace": replace_rank,
    }[sys.argv[1]]
    for _ in range(MEETINGS if action is meet else 1):
        async with aiocoll.new_group(**rendezvous_arguments()) as pg:
            result = await action(pg)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left
    return {"rank": pg.rank(), "size": pg.size(), "result": result}


if __name__ == "__main__":
    before = open_files_and_threads()
    outcome = asyncio.run(main())
    if "EMPTY" in os.environ:
        gc.collect()  # collects the error of the failed call, which references the array
    files, threads = open_files_and_threads()
    assert files <= before[0], files - before[0]
    assert threads == before[1]
    # Write the line in one system call, since several ranks may share one output.
    os.write(1, json.dumps(outcome).encode() + b"\n")
