"""Small broadcasts, reduces and scans in shared memory: through slots, in frames, and mismatched calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, ProcessGroup, ReduceOp
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.work import Work

from ..internals import comm_of
from ..ranks import parametrize_transports
from ..steady_loop import run_steadily
from .test_slot_program import COUNTS, Started, finish, jobs, overwrite_freed_slots, posts, until_revoked

#: A function (group, number of elements, root) that starts a call, and returns its `Work` and a check of the results.
Call = Callable[..., Started]


def array_of(pg: ProcessGroup, count: int) -> np.ndarray:
    """Return an array filled with 2^rank, so that a sum shows which ranks contributed."""
    return np.full(count, 2.0 ** pg.rank())


def with_check(work: Work[Any], array: np.ndarray, expected: float) -> Started:
    def check() -> None:
        assert (array == expected).all(), (array, expected)

    return work, check


def broadcast(pg: ProcessGroup, count: int, root: int, key: str | None = None) -> Started:
    array = array_of(pg, count)
    return with_check(pg.broadcast(array, root, key=key), array, 2.0**root)


def reduce(pg: ProcessGroup, count: int, root: int, key: str | None = None) -> Started:
    array = array_of(pg, count)
    everything = 2.0 ** pg.size() - 1
    return with_check(pg.reduce(array, root, key=key), array, everything if pg.rank() == root else 2.0 ** pg.rank())


def scan(pg: ProcessGroup, count: int, root: int, key: str | None = None) -> Started:
    array = array_of(pg, count)
    return with_check(pg.scan(array, key=key), array, 2.0 ** (pg.rank() + 1) - 1)


def exscan(pg: ProcessGroup, count: int, root: int, key: str | None = None) -> Started:
    array = array_of(pg, count)
    return with_check(pg.exscan(array, key=key), array, 2.0 ** pg.rank() - 1 if pg.rank() else 1.0)


CALLS = pytest.mark.parametrize("call", [broadcast, reduce, scan, exscan])


def is_posted(call: Call, size: int, root: int, rank: int, peer: int) -> bool:
    """Return whether `rank` must post its tensor to `peer`."""
    if call is broadcast:
        return rank == root
    return peer == root if call is reduce else rank < peer


@CALLS
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
async def test_rank_posts_its_tensor_only_to_the_ranks_that_need_the_tensor(call: Call, world_size: int) -> None:
    async with jobs(world_size) as (pgs,):
        for count in COUNTS:
            fits = count * 8 <= comm_of(pgs[0]).slots.largest
            for root in range(world_size):
                ends = [(pg, peer) for pg in pgs for peer in comm_of(pg).others]
                before = [posts(pg, peer) for pg, peer in ends]
                calls = [call(pg, count, root) for pg in pgs]
                kinds = {type(operation) is SlotProgram for pg in pgs for operation in comm_of(pg).in_flight.pending}
                assert kinds <= {fits}
                await finish(calls)
                after = [posts(pg, peer) for pg, peer in ends]
                assert [new - old for old, new in zip(before, after, strict=True)] == [
                    fits and is_posted(call, world_size, root, pg.rank(), peer) for pg, peer in ends
                ]


@CALLS
@pytest.mark.ranks(3)
@parametrize_transports("shm")
@pytest.mark.parametrize("count", [0, 1, 513])
async def test_calls_before_a_shared_memory_link_exists_use_frames(call: Call, count: int, pg: ProcessGroup) -> None:
    calls = [call(pg, count, root % 3) for root in range(20)]
    await finish(calls)


@CALLS
@pytest.mark.parametrize(("count", "slots"), [(1, SMALL_SLOTS), (513, MIDDLE_SLOTS)])
@pytest.mark.parametrize("root", [0, 1])
async def test_full_slots_do_not_delay_calls(call: Call, count: int, slots: int, root: int) -> None:
    async with jobs(2) as ((zero, one),):
        first, last = (zero, one) if is_posted(call, 2, root, 0, 1) else (one, zero)
        before = posts(first, last.rank())
        calls = [call(first, count, root) for _ in range(3 * slots)]
        assert posts(first, last.rank()) - before == slots
        calls += [call(last, count, root) for _ in range(3 * slots)]
        await finish(calls)
        assert zero.pending() == one.pending() == []


@CALLS
@pytest.mark.parametrize("root", [0, 1])
async def test_keyed_calls_finish_although_ranks_start_in_opposite_orders(call: Call, root: int) -> None:
    keys = [str(number) for number in range(200)]
    async with jobs(2) as ((zero, one),):
        calls = [call(zero, 3, root, key) for key in keys]
        calls += [call(one, 3, root, key) for key in reversed(keys)]
        await finish(calls)


@CALLS
async def test_freed_slot_is_not_read_again(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_freed_slots(monkeypatch)
    async with jobs(3) as (pgs,):
        for count in COUNTS:
            for root in range(3):
                await finish([call(pg, count, root) for pg in pgs])


@CALLS
async def test_calls_of_subgroups_give_the_closed_form_results(call: Call) -> None:
    async with jobs(4) as (pgs,):
        groups = [await pg.split_group([[0, 2], [1, 3]]) for pg in pgs]
        for root in (0, 1):
            await finish([call(group, 4, root) for group in groups])


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
async def test_reduction_through_slots_is_computed_in_rank_order(world_size: int) -> None:
    """Check the rank order with an op that is not commutative, and check that only the root divides for AVG."""

    def first(a: Any, b: Any, out: Any) -> None:
        np.subtract(2 * a, b, out=out)

    op = ReduceOp.custom(first, commutative=False)
    folded = [1.0]
    for rank in range(1, world_size):
        folded.append(2 * folded[-1] - (rank + 1))
    async with jobs(world_size) as (pgs,):
        for root in range(world_size):
            arrays = [np.full(3, rank + 1.0) for rank in range(world_size)]
            await asyncio.gather(*(pg.reduce(array, root, op) for pg, array in zip(pgs, arrays, strict=True)))
            assert arrays[root].tolist() == [folded[-1]] * 3
            arrays = [np.full(3, 2.0**rank) for rank in range(world_size)]
            await asyncio.gather(*(pg.reduce(array, root, ReduceOp.AVG) for pg, array in zip(pgs, arrays, strict=True)))
            assert arrays[root].tolist() == [(2.0**world_size - 1) / world_size] * 3
        arrays = [np.full(3, rank + 1.0) for rank in range(world_size)]
        await asyncio.gather(*(pg.scan(array, op) for pg, array in zip(pgs, arrays, strict=True)))
        assert [array[0] for array in arrays] == folded
        arrays = [np.full(3, rank + 1.0) for rank in range(world_size)]
        await asyncio.gather(*(pg.exscan(array, op) for pg, array in zip(pgs, arrays, strict=True)))
        assert [array[0] for array in arrays] == [1.0, *folded[:-1]]


async def test_exception_in_a_reduce_function_at_the_root_fails_the_group() -> None:
    def raise_error(a: Any, b: Any, out: Any) -> None:
        raise ArithmeticError("no")

    async with jobs(2) as ((zero, one),):
        work = zero.reduce(np.zeros(1), 0, ReduceOp.custom(raise_error))
        await one.reduce(np.zeros(1), 0, ReduceOp.custom(raise_error))
        with pytest.raises(GroupError, match="its reduce function raised"):
            await work
        await until_revoked(one)


#: Mismatched calls of rank 0 and rank 1. In most pairs, both calls finish with their posts, and neither rank reads the
#: slots.
PAIRS: dict[str, tuple[Callable[[ProcessGroup], Any], Callable[[ProcessGroup], Any]]] = {
    "both post": (lambda pg: pg.broadcast(np.zeros(3), 0), lambda pg: pg.reduce(np.zeros(3), 0)),
    "counts": (lambda pg: pg.broadcast(np.zeros(3), 0), lambda pg: pg.broadcast(np.zeros(4), 0)),
    "sizes of slots": (lambda pg: pg.broadcast(np.zeros(3), 0), lambda pg: pg.broadcast(np.zeros(4000), 0)),
    "slots and none": (lambda pg: pg.broadcast(np.zeros(3), 0), lambda pg: pg.broadcast(np.zeros(100_000), 0)),
    "roots": (lambda pg: pg.broadcast(np.zeros(3), 0), lambda pg: pg.broadcast(np.zeros(3), 1)),
    "scans": (lambda pg: pg.scan(np.zeros(3)), lambda pg: pg.exscan(np.zeros(3))),
    "a program": (lambda pg: pg.scan(np.zeros(3)), lambda pg: pg.gather(None, np.zeros(3), 0)),
    "to all": (lambda pg: pg.scan(np.zeros(3)), lambda pg: pg.allreduce(np.zeros(3))),
    "a large one": (lambda pg: pg.scan(np.zeros(3)), lambda pg: pg.allreduce(np.zeros(100_000))),
    "dtypes": (lambda pg: pg.reduce(np.zeros(3), 1), lambda pg: pg.reduce(np.zeros(3, "f4"), 1)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("late", [0, 1])
def test_mismatch_through_slots_is_reported_within_a_second(pair: str, late: int) -> None:
    """Let either rank call first. Both calls may finish before a rank finds the mismatch."""
    run_steadily(check_mismatch(pair, late))


async def check_mismatch(pair: str, late: int) -> None:
    async with jobs(2) as (pgs,):
        works: list[Work[Any]] = []
        for rank in (1 - late, late):
            works.append(PAIRS[pair][rank](pgs[rank]))
            for _ in range(20):
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        start = loop.time()
        await until_revoked(*pgs)
        assert loop.time() - start < 1
        await asyncio.gather(*works, return_exceptions=True)
        for pg in pgs:
            with pytest.raises(GroupError) as caught:
                pg.barrier()
            assert isinstance(caught.value.__cause__, CollectiveMismatchError)
            assert "ranks 0 and 1" in str(caught.value.__cause__) or "rank 0" in str(caught.value.__cause__)


@pytest.mark.parametrize("late", [1, 2])
async def test_early_post_is_not_reported_as_stray(late: int) -> None:
    """Check a post that stays unread until its reader calls; the reader then compares the post with its own call."""
    async with jobs(3) as (pgs,):
        works = [pg.broadcast(np.full(2, 7.0), 0) for pg in pgs if pg.rank() != late]
        await works[0]
        await asyncio.sleep(0.3)
        array = np.zeros(2)
        async with asyncio.timeout(20):
            await pgs[late].broadcast(array, 0)
            await works[1]
        assert array.tolist() == [7.0, 7.0]
        works = [pg.broadcast(np.full(2, 7.0), 0) for pg in pgs if pg.rank() != late]
        await works[0]
        await asyncio.sleep(0.3)
        pgs[late].gather(None, np.zeros(3), late)
        await until_revoked(*pgs)


@CALLS
async def test_failed_group_frees_its_slots_for_other_groups(call: Call) -> None:
    async with jobs(2, "ab") as ((a_zero, a_one), (b_zero, b_one)):
        for pg in (a_zero, a_one):
            for root in (0, 1):
                call(pg, 1, root)[0].add_done_callback(lambda work: work.exception())
        a_zero.abort("enough")
        await until_revoked(a_one)
        for root in (0, 1):
            await finish([call(pg, 1, root) for pg in (b_zero, b_one) for _ in range(SMALL_SLOTS)])


@pytest.mark.parametrize("world_size", [2, 3, 4])
async def test_coalesced_calls_use_slots(world_size: int) -> None:
    """Check the calls of a block, which form one operation, including a logical op, which returns only 0 and 1."""
    async with jobs(world_size) as (pgs,):
        root = world_size - 1

        async def block(pg: ProcessGroup) -> None:
            rank = pg.rank()
            arrays = {
                call: [array_of(pg, count) for count in (3, 1)] for call in ("broadcast", "reduce", "scan", "exscan")
            }
            logical = [np.full(2, 7 * (rank == 0)) for _ in range(2)]
            async with pg.coalescing():
                for position in range(2):
                    pg.broadcast(arrays["broadcast"][position], root)
                    pg.reduce(arrays["reduce"][position], root)
                    pg.scan(arrays["scan"][position])
                    pg.exscan(arrays["exscan"][position])
                    pg.scan(logical[position], ReduceOp.LOR)
            expected = {
                "broadcast": 2.0**root,
                "reduce": 2.0**world_size - 1 if rank == root else 2.0**rank,
                "scan": 2.0 ** (rank + 1) - 1,
                "exscan": 2.0**rank - 1 if rank else 1.0,
            }
            for call, found in arrays.items():
                assert all((array == expected[call]).all() for array in found), (call, rank, found)
            assert all((array == 1).all() for array in logical), (rank, logical)

        async with asyncio.timeout(20):
            await asyncio.gather(*map(block, pgs))
