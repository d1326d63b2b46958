"""Two ranks of one process that make every call after no more files can be opened; prints the errors as JSON."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import aiocoll

#: Import SciPy here: it also loads parts of NumPy that NumPy could not load later, without free descriptors.
sparse: Any = importlib.import_module("scipy.sparse") if "sparse" in sys.argv else None


def forbid_new_files() -> None:
    """Forbid new open files: set the limit of open files to the lowest free descriptor number."""
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def calls(pg: aiocoll.ProcessGroup) -> dict[str, Callable[[], Awaitable[Any]]]:
    other, array, rows = 1 - pg.rank(), np.ones(8), np.ones((2, 8))

    async def coalesce() -> None:
        async with pg.coalescing():
            pg.allreduce(np.ones(4))
            pg.allreduce(np.ones(5, "f4"))

    async def send_and_receive(send: Callable[[], Awaitable[Any]], receive: Callable[[], Awaitable[Any]]) -> None:
        work = send()
        await receive()
        await work

    return {
        "allreduce": lambda: pg.allreduce(array),
        "large": lambda: pg.allreduce(np.ones(1 << 18)),
        "half": lambda: pg.allreduce(np.ones(9, "f2")),
        "buffer": lambda: pg.allreduce(bytearray(16)),
        "custom": lambda: pg.allreduce(array, aiocoll.ReduceOp.custom(lambda a, b, out: np.add(a, b, out=out))),
        "broadcast": lambda: pg.broadcast(array, 0),
        "allgather": lambda: pg.allgather(list(rows), array),
        "alltoall": lambda: pg.alltoall(list(np.empty((2, 8))), list(rows)),
        "reduce_scatter": lambda: pg.reduce_scatter(np.empty(8), list(rows)),
        "barrier": pg.barrier,
        "monitored_barrier": pg.monitored_barrier,
        "coalesced": coalesce,
        "messages": lambda: send_and_receive(lambda: pg.send(array, other), lambda: pg.recv(np.empty(8), other)),
        "empty": lambda: pg.empty(8, "f4"),
        "split": lambda: pg.split_group([[0], [1]]),
        "object messages": lambda: send_and_receive(
            lambda: pg.send_object({1: 2}, other), lambda: pg.recv_object(other)
        ),
        "objects": lambda: pg.allgather_object({"a": 1}),
        **({"sparse": lambda: pg.allreduce(sparse.coo_array(np.eye(3)))} if sparse else {}),
    }


async def rank(number: int, store: aiocoll.HashStore, errors: dict[str, str]) -> None:
    options = aiocoll.GroupOptions(transport=sys.argv[1], job_key=bytes(32))
    async with await aiocoll.new_group(store=store, rank=number, world_size=2, options=options) as pg:
        await pg.barrier()
        if number == 0:
            forbid_new_files()
        await pg.barrier()
        for name, call in calls(pg).items():
            try:
                await call()
            except aiocoll.errors.AiocollError as error:
                errors[f"{name} {number}"] = f"{type(error).__name__}: {error}"
            except Exception as error:
                errors[f"{name} {number}"] = "raw: " + "".join(traceback.format_exception(error))


async def main() -> None:
    errors: dict[str, str] = {}
    store = aiocoll.HashStore()
    await asyncio.gather(*(rank(number, store, errors) for number in range(2)))
    print(json.dumps(errors))


asyncio.run(main())
