"""Failing reductions in shared memory: every slot and chunk is freed exactly once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, HashStore, ProcessGroup, ReduceOp, new_group
from tests.ranks import options, run_ranks
from tests.shared_memory import mapped

#: Array length in float64 elements that takes several chunks of a chunk queue.
LARGE = 400_003


class Broken(Exception):
    """The exception that a user's reduce function raises."""


@pytest.mark.parametrize("count", [8, LARGE])
async def test_exception_in_a_reduce_function_frees_the_lane(count: int) -> None:
    """Check that each chunk is freed only once, either by its operation or together with the failed group."""

    async def rank(number: int, store: Any) -> None:
        def function(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
            if number == 1:
                raise Broken
            np.add(a, b, out)

        where = {"store": store, "rank": number, "world_size": 2, "options": options("shm"), "timeout": 5}
        async with new_group(**where) as good, new_group(**where) as bad:
            await good.allreduce(np.ones(LARGE))
            with pytest.raises(GroupError, match="its reduce function raised Broken"):
                await bad.allreduce(np.ones(count), ReduceOp.custom(function))
            for nbytes in (LARGE, 2 * LARGE, 50_000):
                tensor = np.full(nbytes, 1.0 + number)
                await good.allreduce(tensor)
                assert (tensor == 3).all()

    store = HashStore()
    await asyncio.wait_for(asyncio.gather(rank(0, store), rank(1, store)), 30)
    await store.aclose()


async def test_operation_that_fails_during_a_scan_fails_the_other_operations_of_its_group() -> None:
    """Let one of two pending operations fail during a poll; the other one must not write to the caller's array."""
    tensors = [np.ones(4), np.ones(4)]
    entered = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        def function(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
            if pg.rank():
                raise Broken
            np.add(a, b, out)

        await pg.allreduce(np.ones(4))
        if pg.rank() == 0:
            await entered.wait()
        works = [
            pg.allreduce(np.ones(8), ReduceOp.custom(function), key="large"),
            pg.allreduce(tensors[pg.rank()], key="small"),
        ]
        entered.set()
        for work in works if pg.rank() else works[:1]:
            with pytest.raises(GroupError, match="its reduce function raised Broken"):
                await work

    with no_callback_errors():
        await run_ranks(2, rank, transport="shm", timeout=20)
    assert (tensors[1] == 1).all()


@contextmanager
def no_callback_errors() -> Iterator[None]:
    """Check that no callback raises an exception."""
    loop = asyncio.get_running_loop()
    contexts: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: contexts.append(context))
    yield
    assert contexts == []
    loop.set_exception_handler(None)


async def test_shared_memory_of_a_group_is_freed_without_garbage_collection() -> None:
    """Check without a collection: mapped memory is large, and the garbage collector may run hours later."""

    async def rank(pg: ProcessGroup) -> bool:
        for count in (1, 1000, LARGE):
            await pg.allreduce(np.ones(count))
        await pg.barrier()
        return bool(mapped())

    gc.collect()
    gc.disable()
    try:
        assert all(await run_ranks(3, rank, transport="shm"))
        assert mapped() == []
    finally:
        gc.enable()
