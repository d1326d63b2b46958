"""Programs that unauthenticated clients attack: "serve" (a store), "work" or "meet" (ranks). Argument: the program.

Other settings come from the environment. A target reports when it is ready and runs until it gets a line. Then it
reports its costs.
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


class MeasuringLoop(asyncio.SelectorEventLoop):
    """An event loop that records the CPU time of each iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns.append(time.thread_time() - began)


def report(what: Any) -> None:
    """Print a line of JSON for the test."""
    print(json.dumps(what), flush=True)


def resources() -> tuple[int, int]:
    """Return the number of open file descriptors and the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE")


def key() -> bytes:
    return Path(os.environ["AIOCOLL_JOB_KEY_FILE"]).read_bytes()


def serve() -> None:
    """Host the store until a line of input arrives; report the descriptors and the memory of this process."""
    server = StoreServer(os.environ["HOST"], 29500, key=key(), encryption=os.environ["AIOCOLL_ENCRYPTION"])
    server.start()
    before = resources()
    report("ready")
    sys.stdin.readline()
    report({"before": before, "after": resources()})
    server.close()


async def is_finished(group: aiocoll.ProcessGroup, given: asyncio.Task[str] | None) -> bool:
    """Return on all ranks whether rank 0 has received a line of input, which ends the program."""
    over = np.array(given is not None and given.done())
    return bool(await group.broadcast(over, 0))


async def work() -> None:
    """Reduce and check arrays until rank 0 reads a line of input; report the longest call and loop iteration."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MeasuringLoop)
    rank, longest = int(os.environ["RANK"]), 0.0
    async with aiocoll.new_group(timeout=60) as pg:
        given = loop.create_task(asyncio.to_thread(sys.stdin.readline)) if rank == 0 else None
        array = np.empty(10_000)
        await pg.allreduce(array)
        # Exclude all loaded modules from garbage collections, which would otherwise take 20 ms of one loop iteration.
        gc.freeze()
        before = resources()
        report("ready")
        loop.turns.clear()
        while not await is_finished(pg, given):
            array[:] = rank + 1
            began = time.monotonic()
            await pg.allreduce(array)
            longest = max(longest, time.monotonic() - began)
            assert np.all(array == 3), array
            await asyncio.sleep(0.005)  # leave processor time to the attacking clients
        report({"longest": longest, "turn": max(loop.turns), "before": before, "after": resources()})


async def meet() -> None:
    """Meet `TIMES` times, or until rank 0 gets a line; report the seconds that each rendezvous took."""
    most = float(os.environ.get("TIMES", "inf"))
    rank, took = int(os.environ["RANK"]), []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    given = asyncio.create_task(asyncio.to_thread(sys.stdin.readline)) if rank == 0 and most == math.inf else None
    over = False
    while not over:
        began = time.monotonic()
        async with TCPStore(host, port, key=key(), encryption=os.environ["AIOCOLL_ENCRYPTION"]) as store:
            meeting_store = PrefixStore(f"meeting {len(took)}", store)
            async with aiocoll.new_group(store=meeting_store, rank=rank, world_size=2, timeout=60) as pg:
                times = np.array([began, time.monotonic()])
                last, ended = await pg.allreduce(times, op=aiocoll.ReduceOp.MAX)
                took.append(ended - last)
                if len(took) == 1 and most == math.inf:
                    report("ready")
                over = len(took) >= most or await is_finished(pg, given)
    report(took)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        with asyncio.Runner(loop_factory=MeasuringLoop) as runner:
            runner.run(globals()[sys.argv[1]]())
