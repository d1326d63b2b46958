"""What strangers flood: a store, ranks that work, ranks that meet. Argument: which; the rest is in the environment.

Each tells when it is ready, goes on until it is given a line, and tells what that has cost.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import aiocoll
from aiocoll.store import PrefixStore, StoreServer, TCPStore


class Loop(asyncio.SelectorEventLoop):
    """Measures its turns, in seconds of the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns.append(time.thread_time() - began)


def tell(what: Any) -> None:
    """Print a line for the test."""
    print(json.dumps(what), flush=True)


def held() -> tuple[int, int]:
    """Return how many descriptors and how many bytes of memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE")


def key() -> bytes:
    return Path(os.environ["AIOCOLL_JOB_KEY_FILE"]).read_bytes()


def serve() -> None:
    """Host the store."""
    server = StoreServer(os.environ["HOST"], 29500, key=key(), encryption=os.environ["AIOCOLL_ENCRYPTION"])
    server.start()
    before = held()
    tell("ready")
    sys.stdin.readline()
    tell({"before": before, "after": held()})
    server.close()


async def enough(group: aiocoll.ProcessGroup, given: asyncio.Task[str] | None) -> bool:
    """Whether rank 0 has been given its line."""
    over = np.array(given is not None and given.done())
    return bool(await group.broadcast(over, 0))


async def work() -> None:
    """Reduce arrays, look at the results."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    rank, longest = int(os.environ["RANK"]), 0.0
    async with aiocoll.new_group(timeout=60) as pg:
        given = loop.create_task(asyncio.to_thread(sys.stdin.readline)) if rank == 0 else None
        array = np.empty(10_000)
        await pg.allreduce(array)
        gc.freeze()  # else a turn in which Python collects all garbage takes 20 ms for what is loaded, NumPy for one
        before = held()
        tell("ready")
        loop.turns.clear()
        while not await enough(pg, given):
            array[:] = rank + 1
            began = time.monotonic()
            await pg.allreduce(array)
            longest = max(longest, time.monotonic() - began)
            assert np.all(array == 3), array
            await asyncio.sleep(0.005)  # strangers need the processor, too
        tell({"longest": longest, "turn": max(loop.turns), "before": before, "after": held()})


async def meet() -> None:
    """Meet so many times, or until the end, each time from the first connection to the store on."""
    most = float(os.environ.get("TIMES", "inf"))
    rank, took = int(os.environ["RANK"]), []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    given = asyncio.create_task(asyncio.to_thread(sys.stdin.readline)) if rank == 0 and most == math.inf else None
    over = False
    while not over:
        began = time.monotonic()
        async with TCPStore(host, port, key=key(), encryption=os.environ["AIOCOLL_ENCRYPTION"]) as store:
            there = PrefixStore(f"meeting {len(took)}", store)
            async with aiocoll.new_group(store=there, rank=rank, world_size=2, timeout=60) as pg:
                times = np.array([began, time.monotonic()])
                last, ended = await pg.allreduce(times, op=aiocoll.ReduceOp.MAX)
                took.append(ended - last)
                if len(took) == 1 and most == math.inf:
                    tell("ready")
                over = len(took) >= most or await enough(pg, given)
    tell(took)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(globals()[sys.argv[1]]())
