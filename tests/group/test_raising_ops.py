"""Custom ops that raise an exception: its traceback on the same rank, and its text on other ranks."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupRevokedError, ProcessGroup, ReduceOp

from ..ranks import LINKS, run_ranks

#: Element counts that take one step, many steps, and a chunk queue in shared memory.
COUNTS = (1, 1000, 400_003)


class Broken(Exception):
    """The exception that the custom op raises."""


class Op:
    """A custom op that always raises, and the first exception that it raised."""

    def __init__(self) -> None:
        self.raised: Exception | None = None
        self.op = ReduceOp.custom(self.function, name="broken")

    def function(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        try:
            raise Broken("no such case")
        except Broken as error:
            self.raised = self.raised or error
            raise

    def check(self, pg: ProcessGroup, error: GroupError) -> None:
        """Check that the traceback of `error` ends at the line that raised the exception."""
        assert "its reduce function raised Broken: no such case" in str(error)
        if error.ranks != (pg.rank(),):
            assert not isinstance(error.__cause__, Broken)
            return
        assert error.__cause__ is self.raised
        last = traceback.extract_tb(error.__cause__.__traceback__)[-1]
        assert (last.filename, last.line) == (__file__, 'raise Broken("no such case")')


async def failure(call: Awaitable[Any]) -> GroupError:
    with pytest.raises(GroupError) as raised:
        await call
    error = raised.value
    # A rank that does not call the op may fail only at its next call. That error has the group's failure as its cause.
    return error.__cause__ if isinstance(error, GroupRevokedError) else error  # type: ignore[return-value]


CALLS: dict[str, Callable[[ProcessGroup, ReduceOp, int], Awaitable[Any]]] = {
    "allreduce": lambda pg, op, count: pg.allreduce(np.ones(count), op),
    "keyed": lambda pg, op, count: pg.allreduce(np.ones(count), op, key="k"),
    "reduce_scatter": lambda pg, op, count: pg.reduce_scatter(np.ones(count), [np.ones(count)] * pg.size(), op),
    "coalesced": lambda pg, op, count: pg.allreduce_coalesced([np.ones(count), np.ones(3)], op),
}


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", CALLS)
async def test_traceback_of_a_raising_custom_op_contains_the_raising_line(
    kind: str, world_size: int, transport: str
) -> None:
    async def rank(pg: ProcessGroup, count: int) -> bool:
        op = Op()
        error = await failure(CALLS[kind](pg, op.op, count))
        op.check(pg, error)
        return error.ranks == (pg.rank(),)

    for count in COUNTS:
        culprits = await run_ranks(world_size, rank, count, transport=transport)
        assert any(culprits)


@pytest.mark.parametrize("transport", LINKS)
async def test_traceback_of_a_raising_custom_op_in_a_block_contains_the_raising_line(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> bool:
        op = Op()

        async def block() -> None:
            async with pg.coalescing():
                pg.allreduce(np.ones(3), op.op)
                pg.allreduce(np.ones(5), op.op)

        error = await failure(block())
        op.check(pg, error)
        return error.ranks == (pg.rank(),)

    assert any(await run_ranks(3, rank, transport=transport))


async def test_exception_of_a_custom_op_is_the_cause_of_failed_works_and_later_calls() -> None:
    async def rank(pg: ProcessGroup) -> bool:
        op = Op()
        other = asyncio.ensure_future(failure(pg.recv_object()))
        error = await failure(pg.allreduce(np.ones(3), op.op))
        op.check(pg, error)
        op.check(pg, await other)
        with pytest.raises(GroupRevokedError) as raised:
            pg.barrier()
        op.check(pg, raised.value.__cause__)  # type: ignore[arg-type]
        return error.ranks == (pg.rank(),)

    assert any(await run_ranks(3, rank))


@pytest.mark.ranks(1)
async def test_exception_of_a_custom_op_in_a_single_rank_group_keeps_its_traceback(pg: ProcessGroup) -> None:
    op = Op()
    assert await pg.allreduce(1.0, op.op) == 1.0  # a single rank reduces nothing, so the op is not called
    assert op.raised is None
