"""Reductions through shared memory when something goes wrong: no block of a link is lost, none is used twice."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, HashStore, ReduceOp, new_group
from tests.ranks import options

#: Elements of float64 that go through lanes, in some pieces of them.
LARGE = 400_003


class Broken(Exception):
    """What a function of the user's raises."""


@pytest.mark.parametrize("count", [8, LARGE])
async def test_a_function_that_raises_leaves_the_lane_to_others(count: int) -> None:
    """A piece is freed once: by the operation, or with all that the failed group has there."""

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
