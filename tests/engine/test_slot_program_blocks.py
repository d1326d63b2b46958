"""Small allgathers and reduce_scatters in shared memory: through slots, in frames if no slot is free, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, ProcessGroup, ReduceOp
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS

from ..internals import comm_of
from ..ranks import parametrize_transports
from .test_slot_program import COUNTS, Started, finish, jobs, overwrite_freed_slots, posts

#: A function that starts a call, and returns the `Work` and a function that checks the results.
Call = Callable[..., Started]


def start_allgather(pg: ProcessGroup, counts: list[int], key: str | None = None) -> Started:
    outputs = [np.zeros(count, np.int64) for count in counts]
    work = pg.allgather(outputs, np.full(counts[pg.rank()], 10 + pg.rank()), key=key)

    def check() -> None:
        for rank, (count, output) in enumerate(zip(counts, outputs, strict=True)):
            assert output.tolist() == [10 + rank] * count

    return work, check


def start_reduce_scatter(pg: ProcessGroup, counts: list[int], key: str | None = None) -> Started:
    size, rank = pg.size(), pg.rank()
    output = np.zeros(counts[rank], np.int64)
    inputs = [np.full(count, 1000 * peer + rank) for peer, count in enumerate(counts)]
    work = pg.reduce_scatter(output, inputs, key=key)

    def check() -> None:
        assert output.tolist() == [1000 * rank * size + sum(range(size))] * counts[rank]
        assert all((each == 1000 * peer + rank).all() for peer, each in enumerate(inputs)), (
            "reduce_scatter has changed its inputs"
        )

    return work, check


CALLS = pytest.mark.parametrize("call", [start_allgather, start_reduce_scatter])


@CALLS
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("count", COUNTS)
async def test_contributions_that_fit_a_slot_are_sent_through_slots(call: Call, world_size: int, count: int) -> None:
    counts = [count] * world_size
    async with jobs(world_size) as (pgs,):
        before = [posts(pg, peer) for pg in pgs for peer in comm_of(pg).others]
        calls = [call(pg, counts) for pg in pgs]
        fits = count * 8 <= comm_of(pgs[0]).slots.largest
        assert {type(operation) is SlotProgram for pg in pgs for operation in comm_of(pg).in_flight.pending} <= {fits}
        await finish(calls)
        after = [posts(pg, peer) for pg in pgs for peer in comm_of(pg).others]
        assert [new - old for old, new in zip(before, after, strict=True)] == [fits] * len(before)


@CALLS
@pytest.mark.parametrize("counts", [[0, 1, 600], [600, 0, 0], [5, 6, 7], [0, 0, 8192], [0, 0, 0]])
async def test_blocks_of_different_lengths_give_the_closed_form_results(call: Call, counts: list[int]) -> None:
    """Check that the longest block determines the kind of slot that all blocks use."""
    async with jobs(3) as (pgs,):
        for _ in range(3):
            await finish([call(pg, counts) for pg in pgs])


@CALLS
@pytest.mark.ranks(3)
@parametrize_transports("shm")
@pytest.mark.parametrize("counts", [[1, 1, 1], [0, 513, 2]])
async def test_calls_before_a_shared_memory_link_exists_use_frames(
    call: Call, counts: list[int], pg: ProcessGroup
) -> None:
    calls = [call(pg, counts) for _ in range(20)]
    assert all(comm_of(pg).channels[peer].link is None for peer in comm_of(pg).others)
    await finish(calls)


@CALLS
@pytest.mark.parametrize(("count", "slots"), [(1, SMALL_SLOTS), (513, MIDDLE_SLOTS)])
async def test_full_slots_do_not_delay_calls(call: Call, count: int, slots: int) -> None:
    async with jobs(2) as ((zero, one),):
        before = posts(zero, 1)
        calls = [call(zero, [count, count]) for _ in range(3 * slots)]
        assert posts(zero, 1) - before == slots
        calls += [call(one, [count, count]) for _ in range(3 * slots)]
        await finish(calls)
        assert zero.pending() == one.pending() == []


@CALLS
async def test_keyed_calls_finish_although_ranks_start_in_opposite_orders(call: Call) -> None:
    keys = [str(number) for number in range(200)]
    async with jobs(2) as ((zero, one),):
        calls = [call(zero, [3, 2], key) for key in keys]
        calls += [call(one, [3, 2], key) for key in reversed(keys)]
        await finish(calls)


@CALLS
async def test_freed_slot_is_not_read_again(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_freed_slots(monkeypatch)
    async with jobs(3) as (pgs,):
        for counts in ([1, 1, 1], [5, 600, 7]):
            await finish([call(pg, counts) for pg in pgs])


@CALLS
async def test_calls_of_subgroups_give_the_closed_form_results(call: Call) -> None:
    async with jobs(4) as (pgs,):
        groups = [await pg.split_group([[0, 2], [1, 3]]) for pg in pgs]
        for _ in range(5):
            await finish([call(group, [4, 9]) for group in groups])


@pytest.mark.parametrize("op", ["AVG", "affine"])
async def test_reduction_through_slots_is_computed_in_rank_order(op: str) -> None:
    """Check the rank order with an op that is not commutative, and check that AVG divides only once."""
    size = 3

    def subtract(a: Any, b: Any, out: Any) -> None:
        np.subtract(a, b, out=out)

    chosen = ReduceOp.AVG if op == "AVG" else ReduceOp.custom(subtract, commutative=False)
    expected = 3.0 if op == "AVG" else 1.0 - 3.0 - 5.0
    async with jobs(size) as (pgs,):
        outputs = [np.zeros(2) for _ in pgs]
        works = [
            pg.reduce_scatter(output, [np.full(2, 2.0 * rank + 1)] * size, chosen)
            for rank, (pg, output) in enumerate(zip(pgs, outputs, strict=True))
        ]
        await asyncio.gather(*works)
        assert [output.tolist() for output in outputs] == [[expected] * 2] * size


async def test_raising_reduce_function_fails_the_group() -> None:
    def raise_error(a: Any, b: Any, out: Any) -> None:
        raise ArithmeticError("no")

    async with jobs(2) as (pgs,):
        works = [pg.reduce_scatter(np.zeros(1), [np.ones(1)] * 2, ReduceOp.custom(raise_error)) for pg in pgs]
        found = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(error, GroupError) for error in found)
        assert "its reduce function raised" in str(found[0]) + str(found[1])


@pytest.mark.parametrize("other", ["counts", "kind", "dtype", "op"])
async def test_different_calls_through_slots_are_reported_as_a_mismatch(other: str) -> None:
    async with jobs(2) as ((zero, one),):
        first = start_reduce_scatter(zero, [2, 2])[0]
        if other == "counts":
            second = start_reduce_scatter(one, [2, 3])[0]
        elif other == "kind":
            second = start_allgather(one, [2, 2])[0]
        elif other == "dtype":
            second = one.reduce_scatter(np.zeros(2), [np.ones(2)] * 2)
        else:
            second = one.reduce_scatter(np.zeros(2, np.int64), [np.ones(2, np.int64)] * 2, ReduceOp.MAX)
        async with asyncio.timeout(20):
            found = await asyncio.gather(first, second, return_exceptions=True)
        causes = [error if isinstance(error, CollectiveMismatchError) else error.__cause__ for error in found]  # type: ignore[union-attr]
        assert any(isinstance(error, CollectiveMismatchError) for error in causes), found


@CALLS
async def test_failed_group_frees_its_slots_for_other_groups(call: Call) -> None:
    async with jobs(2, "ab") as ((a_zero, a_one), (b_zero, b_one)):
        failed = [call(a_zero, [1, 1])[0] for _ in range(SMALL_SLOTS)]
        a_zero.abort("enough")
        for work in failed:
            with pytest.raises(GroupError):
                await work
        for _ in range(3):
            calls = [call(pg, [1, 1]) for pg in (b_zero, b_one) for _ in range(SMALL_SLOTS)]
            await finish(calls)
        assert a_one.pending() == []
