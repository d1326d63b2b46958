"""Garbage of finished calls: all objects are freed with their last reference, without the garbage collector.

An array that only a reference cycle holds stays allocated until the collector runs. In a program with few objects, this
is seldom.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray

from aiocoll import GroupOptions, ProcessGroup, Recv, Send, testing

from ..ranks import LINKS, options

SIZE = 2
#: A function that makes a call on an array; it makes the other arguments itself.
Call = Callable[[ProcessGroup, NDArray[Any]], Awaitable[Any]]


async def _message(pg: ProcessGroup, array: NDArray[Any]) -> None:
    await (pg.send(array, 1) if pg.rank() == 0 else pg.recv(array, 0))


async def _sparse_message(pg: ProcessGroup, array: NDArray[Any]) -> None:
    matrix = _sparse(array)
    await (pg.send(matrix, 1) if pg.rank() == 0 else pg.recv(matrix, 0))


def _sparse(array: NDArray[Any]) -> Any:
    array[::2] = 1
    return scipy.sparse.csr_array(array.reshape(2, -1))


async def _block(pg: ProcessGroup, array: NDArray[Any]) -> None:
    async with pg.coalescing():
        pg.allreduce(array)
        pg.allreduce(array.copy())
        pg.broadcast(array.copy(), 1)
        pg.allreduce(array.copy(), key="key")
        pg.send(array.copy(), 1 - pg.rank())
        pg.recv(array.copy(), 1 - pg.rank())


CALLS: dict[str, Call] = {
    "allreduce": lambda pg, array: pg.allreduce(array),
    "allreduce with a key": lambda pg, array: pg.allreduce(array, key="key"),
    "reduce": lambda pg, array: pg.reduce(array, 1),
    "broadcast": lambda pg, array: pg.broadcast(array, 1),
    "scan": lambda pg, array: pg.scan(array),
    "barrier": lambda pg, _: pg.barrier(),
    "monitored_barrier": lambda pg, _: pg.monitored_barrier(),
    "allgather": lambda pg, array: pg.allgather([array.copy() for _ in range(SIZE)], array),
    "allgather of any counts": lambda pg, array: pg.allgather(None, array[pg.rank() :]),
    "allgather_into_tensor": lambda pg, array: pg.allgather_into_tensor(np.zeros(SIZE * len(array)), array),
    "gather": lambda pg, array: pg.gather(None, array, 1),
    "scatter": lambda pg, array: pg.scatter(array, [array.copy() for _ in range(SIZE)] if pg.rank() else None, 1),
    "reduce_scatter": lambda pg, array: pg.reduce_scatter(array, [array.copy() for _ in range(SIZE)]),
    "alltoall": lambda pg, array: pg.alltoall([array.copy() for _ in range(SIZE)], [array] * SIZE),
    "allreduce_coalesced": lambda pg, array: pg.allreduce_coalesced([array, array.copy()]),
    "allgather_object": lambda pg, array: pg.allgather_object({"array": array, "list": [1, 2]}),
    "batch": lambda pg, array: pg.batch([Send(array, 1 - pg.rank()), Recv(array.copy(), 1 - pg.rank())]),
    "sparse allreduce": lambda pg, array: pg.allreduce(_sparse(array)),
    "sparse broadcast": lambda pg, array: pg.broadcast(_sparse(array), 1),
    "sparse allgather": lambda pg, array: pg.allgather(None, _sparse(array)),
    "message": _message,
    "sparse message": _sparse_message,
    "block": _block,
}


@contextmanager
def all_garbage() -> Iterator[list[Any]]:
    """Yield a list; at the end of the block, it gets all objects that only the garbage collector could free."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("count", [2, 40_000, 400_000])
@pytest.mark.parametrize("name", CALLS)
async def test_finished_call_leaves_no_reference_cycles(name: str, count: int, transport: str) -> None:
    await testing.run_ranks(SIZE, check_no_garbage, name, count, options=options(transport))


@pytest.mark.parametrize("name", CALLS)
async def test_compared_call_leaves_no_reference_cycles(name: str) -> None:
    await testing.run_ranks(SIZE, check_no_garbage, name, 2, options=GroupOptions(debug="detail"))


async def check_no_garbage(pg: ProcessGroup, name: str, count: int) -> None:
    async def call() -> None:
        await CALLS[name](pg, np.zeros(count))
        await pg.barrier()

    await call()  # the first call creates the objects that all calls of this kind share
    if pg.rank() == 0:
        with all_garbage() as garbage:
            await pg.barrier()
            await call()
        assert not garbage, Counter(type(each).__name__ for each in garbage)
    else:
        await pg.barrier()
        await call()
    await pg.barrier()
