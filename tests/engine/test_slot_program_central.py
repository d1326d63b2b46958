"""Small reductions of many ranks in shared memory, which rank 0 computes for all ranks: in slots and in frames."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, ProcessGroup, ReduceOp
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS

from ..internals import comm_of
from ..ranks import parametrize_transports
from .test_slot_program import COUNTS, call, check, check_failure, jobs, overwrite_freed_slots, posts, rank_array

WORLD_SIZES = [5, 7, 17]


def fits_slot(pg: ProcessGroup, count: int) -> bool:
    return count * 8 <= comm_of(pg).slots.largest


@pytest.mark.parametrize("world_size", WORLD_SIZES)
async def test_ranks_post_to_rank_0_which_posts_the_result_to_all_ranks(world_size: int) -> None:
    async with jobs(world_size) as (pgs,):
        ends = [(pg, peer) for pg in pgs for peer in comm_of(pg).others]
        for count in COUNTS:
            before = [posts(pg, peer) for pg, peer in ends]
            calls = [call(pg, count) for pg in pgs]
            kinds = {type(operation) is SlotProgram for pg in pgs for operation in comm_of(pg).in_flight.pending}
            assert kinds == {fits_slot(pgs[0], count)}
            await check(calls, world_size)
            after = [posts(pg, peer) for pg, peer in ends]
            assert [new - old for old, new in zip(before, after, strict=True)] == [
                fits_slot(pg, count) and 0 in (pg.rank(), peer) for pg, peer in ends
            ]


@pytest.mark.ranks(5, 7)
@parametrize_transports("shm")
@pytest.mark.parametrize("count", COUNTS)
async def test_calls_before_a_shared_memory_link_exists_use_frames(pg: ProcessGroup, count: int) -> None:
    calls = [call(pg, count) for _ in range(20)]
    await check(calls, pg.size())


@pytest.mark.parametrize("late", [0, 1, 4])
@pytest.mark.parametrize(("count", "slots"), [(1, SMALL_SLOTS), (513, MIDDLE_SLOTS)])
async def test_full_slots_do_not_delay_calls(late: int, count: int, slots: int) -> None:
    """Let one rank call late: rank 0 then receives contributions in frames, another rank receives results in frames."""
    async with jobs(5) as (pgs,):
        others = [pg for pg in pgs if pg.rank() != late]
        calls = [call(pg, count) for pg in others for _ in range(3 * slots)]
        calls += [call(pgs[late], count) for _ in range(3 * slots)]
        await check(calls, 5)
        assert [pg.pending() for pg in pgs] == [[]] * 5


async def test_contributions_are_sent_in_frames_when_slots_are_in_use() -> None:
    """Let another group occupy the same slots: rank 0 of that group waits for rank 1, which has not called."""
    async with jobs(5, "ab") as (a, b):
        held = [call(a[0])]
        held += [call(pg) for pg in a[2:]]
        pending = comm_of(a[0]).in_flight.pending
        assert pending, "the call of rank 0 has completed without rank 1"
        first = [call(pg) for pg in b]
        await check(first, 5)
        held.append(call(a[1]))
        await check(held, 5)


async def test_result_without_a_free_slot_is_not_reduced_twice() -> None:
    """Let another group fill all slots and frame rings of rank 0, so that rank 0 cannot post the result at once."""
    count = 8192
    async with jobs(5, "ab") as (a, b):
        fill = [np.full(count, float(number)) for number in range(MIDDLE_SLOTS + 64)]
        sent = [b[0].broadcast(each, 0) for each in fill]
        arrays = [rank_array(pg, count) for pg in a]
        works = [pg.allreduce(array, ReduceOp.AVG) for pg, array in reversed([*zip(a, arrays, strict=True)])]
        # Overwrite the slots of the contributions, which rank 0 has already reduced and freed.
        keys = [str(number) for number in range(16 * MIDDLE_SLOTS)]
        later = [call(pg, count, key) for pg in b[1:] for key in keys]
        (operation,) = comm_of(a[0]).in_flight.pending
        assert operation.awaited_ranks() == []
        taken = [(pg.broadcast(into := np.empty(count), 0), into, each) for pg in b[1:] for each in fill]
        for work in works + sent:
            await work
        for work, into, each in taken:
            await work
            assert (into == each).all()
        assert all((array == 31 / 5).all() for array in arrays)
        await check(later + [call(b[0], count, key) for key in keys], 5)


async def test_freed_slot_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_freed_slots(monkeypatch)
    async with jobs(5) as (pgs,):
        for count in COUNTS:
            await check([call(pg, count) for pg in pgs], 5)


async def test_results_are_bitwise_equal_on_all_ranks() -> None:
    """Check float sums, whose bits depend on the order of the additions: all ranks must add in rank order."""
    tenths = [np.array([0.1 * (rank + 1), 1e16, -1e16 if rank else 1.0]) for rank in range(7)]
    expected = tenths[0].copy()
    for each in tenths[1:]:
        expected += each
    async with jobs(7) as (pgs,):
        await asyncio.gather(*(pg.allreduce(tenths[pg.rank()], ReduceOp.SUM) for pg in pgs))
    assert {each.tobytes() for each in tenths} == {expected.tobytes()}


async def test_ranks_without_a_posted_contribution_are_reported_as_awaited() -> None:
    async with jobs(5) as (pgs,):
        works = [call(pg) for pg in pgs if pg.rank() != 3]
        awaited = [[operation.awaited_ranks() for operation in comm_of(pg).in_flight.pending] for pg in pgs]
        assert awaited == [[[3]], [[0]], [[0]], [], [[0]]]
        await check([*works, call(pgs[3])], 5)


@pytest.mark.parametrize("wrong", [0, 1, 4])
async def test_mismatched_call_is_reported_on_all_ranks(wrong: int) -> None:
    async with jobs(5) as (pgs,):
        works = [pg.allreduce(np.ones(4 if pg.rank() == wrong else 3)) for pg in pgs]
        for work in works:
            with pytest.raises(CollectiveMismatchError):
                await work


@pytest.mark.parametrize("gone", [0, 1, 4])
async def test_abort_of_one_rank_fails_the_call_on_all_ranks(gone: int) -> None:
    async with jobs(5) as (pgs,):
        works = [call(pg)[1] for pg in pgs if pg.rank() != gone]
        pgs[gone].abort("a test")
        for work in works:
            await check_failure(work)


@pytest.mark.ranks(5, 7)
@parametrize_transports("shm")
async def test_rank_can_leave_as_soon_as_it_has_its_result(pg: ProcessGroup) -> None:
    array, work = call(pg)
    await work
    assert (array == 2.0 ** pg.size() - 1).all()
