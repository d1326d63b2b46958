"""Kills ranks: reads scenarios, runs each on processes of its own, and writes what the survivors raised, and when.

The ranks are forked, so a run takes a fraction of a second. The victim says the time just before it kills itself, in
the middle of a call; clocks of processes of one machine agree.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from aiocoll import GroupError, GroupOptions, GroupRevokedError, ProcessGroup, new_group
from aiocoll.algorithms.machine import SingleCopy
from tests.ports import free_port

from ..internals import comm_of

WORLD_SIZE = 4
#: Seconds after which a run has failed; one takes less than a second.
LIMIT = 60
#: Elements of float64: one message, and one of many segments that waits for its receiver.
SMALL, LARGE = 8, 131_072

TRANSPORTS = ("unix", "tcp", "shm")
#: Through shared memory, with all large messages read in the memory of the other process.
SINGLE_COPY = "single copy"

Call = Callable[[ProcessGroup, int, int], Awaitable[Any]]


def each(pg: ProcessGroup, count: int) -> list[np.ndarray]:
    return [np.ones(count) for _ in range(pg.size())]


#: Every kind of collective, as a function of group, root and count.
CALLS: dict[str, Call] = {
    "allreduce": lambda pg, root, n: pg.allreduce(np.ones(n)),
    "reduce": lambda pg, root, n: pg.reduce(np.ones(n), root),
    "broadcast": lambda pg, root, n: pg.broadcast(np.ones(n), root),
    "allgather": lambda pg, root, n: pg.allgather(None, np.ones(n)),
    "gather": lambda pg, root, n: pg.gather(None, np.ones(n), root),
    "scatter": lambda pg, root, n: pg.scatter(np.empty(n), each(pg, n) if pg.rank() == root else None, root),
    "reduce_scatter": lambda pg, root, n: pg.reduce_scatter(np.empty(n), each(pg, n)),
    "alltoall": lambda pg, root, n: pg.alltoall(each(pg, n), each(pg, n)),
    "scan": lambda pg, root, n: pg.scan(np.ones(n)),
    "exscan": lambda pg, root, n: pg.exscan(np.ones(n)),
    "barrier": lambda pg, root, n: pg.barrier(),
    "allgather_object": lambda pg, root, n: pg.allgather_object(bytes(n)),
    "sendrecv": lambda pg, root, n: ring(pg, n),
}


async def ring(pg: ProcessGroup, count: int) -> None:
    sending = pg.send(np.ones(count), (pg.rank() + 1) % pg.size())
    await pg.recv(np.empty(count), (pg.rank() - 1) % pg.size())
    await sending


def scenarios() -> list[dict[str, Any]]:
    """Return every kind of call with every victim, on every transport, with small and large arrays."""
    every = itertools.product(CALLS, range(WORLD_SIZE), (*TRANSPORTS, SINGLE_COPY), (SMALL, LARGE))
    return [
        # Number `rounds` of calls that succeed, and of turns of the loop before the victim dies in the next one.
        {"kind": kind, "victim": victim, "transport": transport, "count": count, "rounds": n % 5, "turns": n % 3}
        | {"root": (victim + n) % WORLD_SIZE}
        for n, (kind, victim, transport, count) in enumerate(every)
    ]


def held() -> dict[str, str]:
    """Return the files of this process, and what it has mapped of ours."""
    fds = Path("/proc/self/fd")
    files = {fd: os.readlink(fds / fd) for fd in os.listdir(fds) if (fds / fd).is_symlink()}
    maps = Path("/proc/self/maps").read_text().splitlines()
    return files | {line.split()[0]: line.split()[5] for line in maps if "aiocoll" in line and ".so" not in line}


async def rank(number: int, scenario: dict[str, Any], port: int, say: Callable[[dict[str, Any]], None]) -> None:
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
            say({"killed": time.monotonic(), "done": dying.done()})
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await pg.barrier()
            while True:
                await call(pg, root, count)
        except GroupError as error:
            found = time.monotonic()
            first = error.__cause__ if isinstance(error, GroupRevokedError) else error
        await linked(pg)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    ranks, how = getattr(first, "ranks", None), getattr(first, "how", None)
    say({"rank": number, "at": found, "raised": type(first).__name__, "ranks": ranks, "how": how, "left": left})


async def linked(pg: ProcessGroup) -> None:
    """Return when this rank has a control link: to the next hub, if the victim was the hub."""
    async with asyncio.timeout(LIMIT / 6):
        while not comm_of(pg).endpoint.control.links:  # noqa: ASYNC110
            await asyncio.sleep(0)


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return the scenario with what its ranks said, and what their processes ended with."""
    port = free_port()
    reading, writing = os.pipe()
    children = []
    for number in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            child(number, scenario, port, writing)
        children.append(pid)
    os.close(writing)
    signal.alarm(LIMIT)  # ends this process; the ranks have timeouts of their own
    with open(reading) as pipe:
        said = [json.loads(line) for line in pipe]
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    signal.alarm(0)
    return {**scenario, "said": said, "ends": ends}


def child(number: int, scenario: dict[str, Any], port: int, writing: int) -> None:
    code = 1
    try:
        before = held()
        # A line is short enough to be written in one piece.
        asyncio.run(rank(number, scenario, port, lambda told: os.write(writing, (json.dumps(told) + "\n").encode())))
        assert (left := held()) == before, left
        assert threading.enumerate() == [threading.current_thread()]
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    everything = scenarios()
    for index in chosen:
        print(json.dumps(run(everything[index])), flush=True)
