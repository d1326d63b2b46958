"""Garbage of device calls: all objects are freed with their last reference, without the garbage collector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, Recv, Send

from ..group.test_garbage import all_garbage
from ..ranks import run_ranks
from .groups import WAYS, Gpus, gpus, wait_for_idle_launcher

SIZE = 2
#: A function that makes a call. Its second argument makes a tensor on this rank's device.
Call = Callable[[ProcessGroup, Callable[[], Any]], Awaitable[Any]]


async def _block(pg: ProcessGroup, tensor: Callable[[], Any]) -> None:
    async with pg.coalescing():
        pg.allreduce(tensor())
        pg.broadcast(tensor(), 1)
        pg.allreduce(tensor())
        pg.allreduce(np.zeros(3))


CALLS: dict[str, Call] = {
    "allreduce": lambda pg, tensor: pg.allreduce(tensor()),
    "allreduce with a key": lambda pg, tensor: pg.allreduce(tensor(), key="key"),
    "allreduce on a stream": lambda pg, tensor: pg.allreduce(tensor()).on_stream(),
    "allgather": lambda pg, tensor: pg.allgather([tensor(), tensor()], tensor()),
    "alltoall": lambda pg, tensor: pg.alltoall([tensor(), tensor()], [tensor(), tensor()]),
    "scatter": lambda pg, tensor: pg.scatter(tensor(), [tensor(), tensor()] if pg.rank() else None, 1),
    "allreduce_coalesced": lambda pg, tensor: pg.allreduce_coalesced([tensor(), tensor()]),
    "message": lambda pg, tensor: pg.recv(tensor(), 0) if pg.rank() else pg.send(tensor(), 1),
    "batch": lambda pg, tensor: pg.batch([Send(tensor(), 1 - pg.rank()), Recv(tensor(), 1 - pg.rank())]),
    "block": _block,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
async def test_device_call_leaves_no_objects_to_the_garbage_collector(name: str, way: str) -> None:
    async def rank(pg: ProcessGroup, gpu: Gpus) -> None:
        async def call() -> None:
            await CALLS[name](pg, lambda: gpu.tensor(np.zeros(3), pg.rank()))
            await pg.barrier()
            await wait_for_idle_launcher(pg, gpu)

        for _ in range(3):  # the first calls create the objects that all calls share
            await call()
        if pg.rank() == 0:
            with all_garbage() as garbage:
                await call()
            # Ignore garbage of the fake CUDA, which is not part of aiocoll.
            own_garbage = [type(each).__name__ for each in garbage if type(each).__module__.startswith("aiocoll.")]
            assert not own_garbage, Counter(own_garbage)
        else:
            await call()
        await pg.barrier()

    with gpus(SIZE, way) as gpu:
        await run_ranks(SIZE, rank, gpu)
