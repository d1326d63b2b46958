"""The program of one rank in tests on several hosts. Argument: the task; other settings come from the environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import aiocoll
from aiocoll.algorithms.machine import Tuning
from aiocoll.store import StoreServer
from tests.internals import comm_of


def report(what: Any) -> None:
    """Print a line of JSON for the test."""
    print(json.dumps(what), flush=True)


def group_arguments() -> dict[str, Any]:
    """Return the arguments for `new_group` from the environment variables of the test."""
    method = os.environ["METHOD"]
    if "JOIN" in os.environ:
        return {"init_method": method, "join": True, "timeout": 60}
    numbers = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    timeout = float(os.environ.get("TIMEOUT", "60"))
    if method.startswith("store:"):
        key = Path(os.environ["AIOCOLL_JOB_KEY_FILE"]).read_bytes()
        store = aiocoll.TCPStore(method.removeprefix("store:"), 29500, is_master=numbers["rank"] == 0, key=key)
        return {"store": store, **numbers, "timeout": timeout}
    return {"init_method": method, **numbers, "timeout": timeout}


async def total(pg: aiocoll.ProcessGroup) -> Any:
    """Return the first and the last element of an allreduce of rank numbers, counted from 1."""
    result = await pg.allreduce(np.full(1000, pg.rank() + 1.0))
    return float(result[0]), float(result[-1])


async def carriers(pg: aiocoll.ProcessGroup) -> Any:
    """Return the medium of the link to each other rank: "tcp", "unix" or "shm"."""
    assert await pg.alltoall_object([pg.rank()] * pg.size()) == list(range(pg.size()))
    transport: Any = comm_of(pg).endpoint.context.transport
    found = [None if peer == pg.rank() else transport.carrier(peer)[0] for peer in range(pg.size())]
    await pg.barrier()  # keeps the rank, since a rank that has left has no links
    return found


async def links(pg: aiocoll.ProcessGroup) -> Any:
    """Return this rank's figures for links between hosts: round-trip time in seconds, and bytes per second."""
    tcp = comm_of(pg).tuning.tcp
    await pg.barrier()
    return 2 * (tcp.alpha - Tuning().tcp.alpha), 1 / tcp.beta


async def send_secrets(pg: aiocoll.ProcessGroup) -> Any:
    """Send secret data by every kind of call."""
    words = np.frombuffer(b"a tensor is secret " * 10_000, np.uint8).copy()
    await pg.broadcast(words, 0)
    received = await pg.allgather_object("an object is secret")
    if pg.rank():
        await pg.send_object("a message is secret", 0)
        await pg.send(words[:19].copy(), 0)
    else:
        received.append(await pg.recv_object(1))
        await pg.recv(words[:19], 1)
    return len(received)


async def one_way(pg: aiocoll.ProcessGroup) -> Any:
    """Send an array from rank 0 to rank 1 and on to rank 2, and nothing in the opposite direction."""
    array = np.full(300_000, float(pg.rank() == 0))
    if pg.rank() > 0:
        await pg.recv(array, pg.rank() - 1)
    if pg.rank() < pg.size() - 1:
        await pg.send(array, pg.rank() + 1)
    return float(array[-1]) if pg.rank() else 0.0


def failure_report(cause: aiocoll.GroupError) -> Any:
    """Return the report of a failure with the current time of the clock that all simulated hosts share."""
    at = time.monotonic()
    assert isinstance(cause, aiocoll.PeerLostError), repr(cause)
    return {"how": cause.how, "ranks": list(cause.ranks), "text": str(cause), "at": at}


async def reduce_until_failure(pg: aiocoll.ProcessGroup) -> Any:
    """Reduce large arrays, so that data is in flight at any time, until a call fails; return the failure report."""
    array = np.ones(1_000_000)
    await pg.allreduce(array)
    report("ready")
    try:
        while True:
            await pg.allreduce(array, op=aiocoll.ReduceOp.MAX)
    except aiocoll.GroupError as error:
        return failure_report(error)


async def shrink_after_failure(pg: aiocoll.ProcessGroup) -> Any:
    """Reduce until a call fails, then shrink; return the ranks of the new group, or None if this rank is excluded."""
    await reduce_until_failure(pg)
    try:
        async with await pg.shrink() as small:
            assert await small.allreduce(1) == small.size()
            return list(small.global_ranks)
    except aiocoll.GroupError:
        return None


async def receive(pg: aiocoll.ProcessGroup) -> Any:
    """Let ranks 1 and 2 wait for messages from each other that are never sent, with an open link between them."""
    await pg.allreduce(np.ones(1_000_000))
    if pg.rank():
        work = pg.recv(np.ones(1), 3 - pg.rank())
    report("ready")
    cause = failure_report(await pg.wait_revoked())
    if pg.rank():
        assert isinstance(work.exception(), aiocoll.PeerLostError)
    return cause


async def dial(pg: aiocoll.ProcessGroup) -> Any:
    """Let ranks 1 and 2 dial each other for the first time after the test has sent a line."""
    report("ready")
    await asyncio.to_thread(sys.stdin.readline)
    if pg.rank():
        work = pg.send(np.ones(1), 3 - pg.rank())
    cause = failure_report(await pg.wait_revoked())
    if pg.rank():
        assert isinstance(work.exception(), aiocoll.PeerLostError)
    return cause


async def reduce_until_line(pg: aiocoll.ProcessGroup) -> Any:
    """Reduce arrays until the test sends a line to rank 0; return the seconds of the longest call."""
    enough = asyncio.create_task(asyncio.to_thread(sys.stdin.readline)) if pg.rank() == 0 else None
    array = np.empty(100_000)
    longest, reported = 0.0, False
    while True:
        over = enough is not None and enough.done()
        array[:] = pg.rank() + 1
        array[0] = over
        began = time.monotonic()
        await pg.allreduce(array)
        longest = max(longest, time.monotonic() - began)
        assert np.all(array[1:] == pg.size() * (pg.size() + 1) / 2)
        if array[0]:
            return longest
        if not reported:
            report("ready")
            reported = True


async def block_loop(pg: aiocoll.ProcessGroup) -> Any:
    """Block the loop of rank 2 for `BLOCKED` seconds, while more data arrives than the kernel buffers."""
    array = np.full(8_000_000, 7.0 if pg.rank() == 1 else 0.0)
    await pg.allreduce(np.ones(1_000_000))
    if pg.rank() == 2:
        work = pg.recv(array, 1)
        await pg.barrier()
        threading.Event().wait(float(os.environ["BLOCKED"]))
        await work
    else:
        await pg.barrier()
        if pg.rank() == 1:
            await pg.send(array, 2)
    await pg.barrier()
    return float(array[-1])


async def replace_rank_0(pg: aiocoll.ProcessGroup) -> Any:
    """End rank 0 when the test sends a line; shrink the group, and then replace rank 0 by another process."""
    report("ready")
    if pg.rank() == 0:
        await asyncio.to_thread(sys.stdin.readline)
        os.kill(os.getpid(), signal.SIGKILL)
    await pg.wait_revoked()
    async with await pg.shrink() as small:
        try:
            async with await small.grow(1) as grown:
                return await total(grown)
        except aiocoll.StoreUnavailableError as error:
            return str(error)


def serve() -> None:
    """Host the store, as a launcher does, until the test sends a line."""
    key = Path(os.environ["AIOCOLL_JOB_KEY_FILE"]).read_bytes()
    server = StoreServer(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), key=key)
    server.start()
    report("ready")
    sys.stdin.readline()
    server.close()


async def report_failed_meeting(place: dict[str, Any]) -> None:
    """Fail to meet when the test sends a line; report the error, and keep the store open until the next line.

    So all ranks start together, and no rank sees another one leave.
    """
    async with place["store"]:
        report("ready")
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await aiocoll.new_group(**place)
        except aiocoll.RendezvousError as error:
            report(str(error))
        await asyncio.to_thread(sys.stdin.readline)


async def main(what: str) -> None:
    """Make the group, carry out the task `what`, and report the result of the task."""
    place = group_arguments()
    if what == "report_failed_meeting":
        await report_failed_meeting(place)
        return
    async with contextlib.AsyncExitStack() as stack:
        if "store" in place:
            await stack.enter_async_context(place["store"])
        pg = await stack.enter_async_context(aiocoll.new_group(**place))
        report(await globals()[what](pg))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        asyncio.run(main(sys.argv[1]))
