"""A rank on one of several hosts. Argument: what to do; everything else is in the environment."""

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


def tell(what: Any) -> None:
    """Print a line for the test."""
    print(json.dumps(what), flush=True)


def where() -> dict[str, Any]:
    """Return what `new_group` is to know."""
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
    """Return a sum, and where peers find this rank."""
    result = await pg.allreduce(np.full(1000, pg.rank() + 1.0))
    return float(result[0]), float(result[-1])


async def carriers(pg: aiocoll.ProcessGroup) -> Any:
    """Return over what this rank talks to each of the others."""
    assert await pg.alltoall_object([pg.rank()] * pg.size()) == list(range(pg.size()))
    transport: Any = comm_of(pg).endpoint.context.transport
    found = [None if peer == pg.rank() else transport.carrier(peer)[0] for peer in range(pg.size())]
    await pg.barrier()  # whoever has left is talked to over nothing
    return found


async def links(pg: aiocoll.ProcessGroup) -> Any:
    """Return what this rank believes of the link between hosts: round trip and bytes per second."""
    tcp = comm_of(pg).tuning.tcp
    await pg.barrier()
    return 2 * (tcp.alpha - Tuning().tcp.alpha), 1 / tcp.beta


async def confide(pg: aiocoll.ProcessGroup) -> Any:
    """Send what nobody else is to know, in every way there is."""
    words = np.frombuffer(b"a tensor is secret " * 10_000, np.uint8).copy()
    await pg.broadcast(words, 0)
    said = await pg.allgather_object("an object is secret")
    if pg.rank():
        await pg.send_object("a message is secret", 0)
        await pg.send(words[:19].copy(), 0)
    else:
        said.append(await pg.recv_object(1))
        await pg.recv(words[:19], 1)
    return len(said)


async def one_way(pg: aiocoll.ProcessGroup) -> Any:
    """Rank 0 sends to 1, and 1 to 2, and none of them anything else."""
    array = np.full(300_000, float(pg.rank() == 0))
    if pg.rank() > 0:
        await pg.recv(array, pg.rank() - 1)
    if pg.rank() < pg.size() - 1:
        await pg.send(array, pg.rank() + 1)
    return float(array[-1]) if pg.rank() else 0.0


def told_of(cause: aiocoll.GroupError) -> Any:
    """Return what the test wants to know of a failure, and when it was, by the clock that all hosts share."""
    at = time.monotonic()
    assert isinstance(cause, aiocoll.PeerLostError), repr(cause)
    return {"how": cause.how, "ranks": list(cause.ranks), "text": str(cause), "at": at}


async def busy(pg: aiocoll.ProcessGroup) -> Any:
    """Reduce arrays, large enough that data is in flight at any time, until that fails."""
    array = np.ones(1_000_000)
    await pg.allreduce(array)
    tell("ready")
    try:
        while True:
            await pg.allreduce(array, op=aiocoll.ReduceOp.MAX)
    except aiocoll.GroupError as error:
        return told_of(error)


async def go_on(pg: aiocoll.ProcessGroup) -> Any:
    """Be busy until that fails; return the ranks that go on together, or None if this one does not."""
    await busy(pg)
    try:
        async with await pg.shrink() as small:
            assert await small.allreduce(1) == small.size()
            return list(small.global_ranks)
    except aiocoll.GroupError:
        return None


async def receive(pg: aiocoll.ProcessGroup) -> Any:
    """Ranks 1 and 2 wait for messages from each other, which are never sent, over a link that has been used."""
    await pg.allreduce(np.ones(1_000_000))
    if pg.rank():
        work = pg.recv(np.ones(1), 3 - pg.rank())
    tell("ready")
    cause = told_of(await pg.wait_revoked())
    if pg.rank():
        assert isinstance(work.exception(), aiocoll.PeerLostError)
    return cause


async def dial(pg: aiocoll.ProcessGroup) -> Any:
    """Once the test says so, ranks 1 and 2 need each other for the first time."""
    tell("ready")
    await asyncio.to_thread(sys.stdin.readline)
    if pg.rank():
        work = pg.send(np.ones(1), 3 - pg.rank())
    cause = told_of(await pg.wait_revoked())
    if pg.rank():
        assert isinstance(work.exception(), aiocoll.PeerLostError)
    return cause


async def endure(pg: aiocoll.ProcessGroup) -> Any:
    """Reduce arrays until the test says that it is enough; return the seconds that the longest took."""
    enough = asyncio.create_task(asyncio.to_thread(sys.stdin.readline)) if pg.rank() == 0 else None
    array = np.empty(100_000)
    longest, told = 0.0, False
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
        if not told:
            tell("ready")
            told = True


async def block(pg: aiocoll.ProcessGroup) -> Any:
    """Rank 2 blocks its loop for `BLOCKED` seconds, while more waits for it than the kernel takes."""
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


async def die(pg: aiocoll.ProcessGroup) -> Any:
    """Rank 0 is killed, and another process takes its place."""
    tell("ready")
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
    """Host the store, as a launcher does, until the test says that it is enough."""
    key = Path(os.environ["AIOCOLL_JOB_KEY_FILE"]).read_bytes()
    server = StoreServer(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), key=key)
    server.start()
    tell("ready")
    sys.stdin.readline()
    server.close()


async def main(what: str) -> None:
    """Do it, and tell the result."""
    place = where()
    async with contextlib.AsyncExitStack() as stack:
        if "store" in place:
            await stack.enter_async_context(place["store"])
        pg = await stack.enter_async_context(aiocoll.new_group(**place))
        tell(await globals()[what](pg))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        asyncio.run(main(sys.argv[1]))
