"""Small reductions in shared memory: through slots, in frames if no slot is free, and after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, HashStore, ProcessGroup, new_group
from aiocoll.engine.job.ids import hash62
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.transport.shm.slots import SlotReader
from aiocoll.work import Work

from ..internals import comm_of, use_same_slots
from ..ranks import options, parametrize_transports, wait_until

#: Array lengths in float64 elements: two each for the 64-byte line of a slot, for a small slot and for a middle slot.
COUNTS = [1, 5, 6, 512, 513, 8192]

#: A started call: its `Work`, and a function that checks the results.
Started = tuple[Work[Any], Callable[[], None]]


async def open_links(pgs: list[ProcessGroup]) -> None:
    """Open the data links between all ranks, and wait for their shared memory."""
    await asyncio.gather(*(pg.allgather(None, np.zeros(1)) for pg in pgs))
    await wait_until(lambda: all(comm_of(pg).channels[peer].shared for pg in pgs for peer in comm_of(pg).others))


@asynccontextmanager
async def jobs(world_size: int, names: str = "a") -> AsyncIterator[list[list[ProcessGroup]]]:
    """Yield the ranks of one group per name in `names`; all groups use the same call numbers and the same slots."""
    store = HashStore()
    pgs = [
        await asyncio.gather(
            *(
                new_group(store=store, rank=rank, world_size=world_size, name=name, options=options("shm"))
                for rank in range(world_size)
            )
        )
        for name in names
    ]
    try:
        for group in pgs:
            await open_links(group)
            for pg in group:
                use_same_slots(pg)
        yield pgs
    finally:
        await asyncio.gather(*(pg.shutdown() for group in pgs for pg in group))
        await store.aclose()


def posts(pg: ProcessGroup, peer: int) -> int:
    """Return the number of contributions that this rank has posted to `peer`."""
    shared = comm_of(pg).channels[peer].shared
    assert shared is not None
    return int(shared.lane_writer.total)


def rank_array(pg: ProcessGroup, count: int = 3) -> np.ndarray:
    return np.full(count, 2.0 ** pg.rank())


def call(pg: ProcessGroup, count: int = 3, key: str | None = None) -> tuple[np.ndarray, Work[object]]:
    array = rank_array(pg, count)
    return array, pg.allreduce(array, key=key)


async def check(calls: list[tuple[np.ndarray, Work[object]]], world_size: int) -> None:
    for array, work in calls:
        async with asyncio.timeout(20):
            await work
        assert (array == 2.0**world_size - 1).all()


async def finish(calls: list[Started]) -> None:
    """Wait for calls, and check their results."""
    async with asyncio.timeout(20):
        for work, check_result in calls:
            await work
            check_result()


async def until_revoked(*pgs: ProcessGroup) -> None:
    """Wait until the group is revoked on each of these ranks."""
    async with asyncio.timeout(20):
        await asyncio.gather(*(pg.wait_revoked() for pg in pgs))


def overwrite_freed_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite each slot as soon as the reader frees the slot, like a writer that posts again at once."""
    view, free = SlotReader.view, SlotReader.free
    read: dict[tuple[int, int], list[np.ndarray]] = {}

    def viewing(self: SlotReader, slot: int, dtype: np.dtype, count: int) -> np.ndarray:
        array = view(self, slot, dtype, count).copy()
        read.setdefault((id(self), slot), []).append(array)
        return array

    def overwriting(self: SlotReader, slot: int, group: int) -> None:
        free(self, slot, group)
        for array in read.pop((id(self), slot), ()):
            array.view(np.uint8)[:] = 0xAA

    monkeypatch.setattr(SlotReader, "view", viewing)
    monkeypatch.setattr(SlotReader, "free", overwriting)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("count", COUNTS)
async def test_contributions_that_fit_a_slot_are_sent_through_slots(world_size: int, count: int) -> None:
    async with jobs(world_size) as (pgs,):
        before = [posts(pg, peer) for pg in pgs for peer in comm_of(pg).others]
        calls = [call(pg, count) for pg in pgs]
        fits = count * 8 <= comm_of(pgs[0]).slots.largest
        assert {type(operation) is SlotProgram for pg in pgs for operation in comm_of(pg).in_flight.pending} <= {fits}
        await check(calls, world_size)
        after = [posts(pg, peer) for pg in pgs for peer in comm_of(pg).others]
        assert [new - old for old, new in zip(before, after, strict=True)] == [fits] * len(before)


@pytest.mark.ranks(2)
@parametrize_transports("shm")
@pytest.mark.parametrize("count", COUNTS)
async def test_calls_before_a_shared_memory_link_exists_use_frames(pg: ProcessGroup, count: int) -> None:
    calls = [call(pg, count) for _ in range(20)]
    assert comm_of(pg).channels[1 - pg.rank()].link is None
    await check(calls, 2)
    assert posts(pg, 1 - pg.rank()) < len(calls)


@pytest.mark.parametrize(
    ("count", "slots"), [(1, SMALL_SLOTS), (512, SMALL_SLOTS), (513, MIDDLE_SLOTS), (8192, MIDDLE_SLOTS)]
)
async def test_full_slots_do_not_delay_calls(count: int, slots: int) -> None:
    async with jobs(2) as ((zero, one),):
        before = posts(zero, 1)
        calls = [call(zero, count) for _ in range(3 * slots)]
        assert posts(zero, 1) - before == slots
        calls += [call(one, count) for _ in range(3 * slots)]
        await check(calls, 2)
        assert zero.pending() == one.pending() == []


async def test_contribution_received_in_a_frame_outlives_the_frame() -> None:
    async with jobs(3) as (pgs,):
        array, work = call(pgs[0])
        (operation,) = comm_of(pgs[0]).in_flight.pending
        frame = bytearray(rank_array(pgs[1]).tobytes())
        assert operation.deliver(1, 0, len(frame), memoryview(frame), len(frame))
        frame[:] = bytes(len(frame))
        other = call(pgs[2])[1]
        await check([(array, work)], 3)
        pgs[2].abort("its peer has called nothing")
        await check_failure(other)


async def test_peer_whose_contribution_has_arrived_is_not_reported_as_awaited() -> None:
    async with jobs(2) as ((zero, one),):
        first = call(zero)
        (operation,) = comm_of(zero).in_flight.pending
        assert operation.needs(1)
        second = call(one)
        assert not operation.needs(1)
        assert first[1].done()
        await check([first, second], 2)


async def test_slot_of_a_finished_group_is_freed_by_a_later_frame() -> None:
    async with jobs(2, "ab") as ((a_zero, a_one), (b_zero, b_one)):
        shared, far = comm_of(b_zero).channels[1].shared, comm_of(b_one).channels[0].shared
        assert shared is not None
        assert far is not None
        far.lane_reader.purge(comm_of(a_one).id)
        late = call(a_zero)[1]
        calls = [call(b_zero), call(b_one)]
        await check(calls, 2)
        assert list(shared.lane_writer.consumed) == list(shared.lane_writer.posted)
        a_zero.abort("a test")
        await check_failure(late)


async def test_frame_that_is_sent_at_once_can_complete_the_call() -> None:
    """Check a call whose last step is the send of a frame."""
    async with jobs(2, "ab") as ((a_zero, a_one), (b_zero, b_one)):
        calls = [call(a_one), call(b_zero)]
        before = posts(b_one, 0)
        calls.append(call(b_one))
        assert posts(b_one, 0) == before, "the call of the other group still holds the slot"
        assert calls[-1][1].done()
        calls.append(call(a_zero))
        await check(calls, 2)


@pytest.mark.parametrize("count", COUNTS)
async def test_slots_are_used_by_several_groups(count: int) -> None:
    """Let each rank call the groups in a different order, so that slots stay in use for late readers."""
    world_size, names = 3, "abcd"
    async with jobs(world_size, names) as groups:
        calls = []
        for rank in range(world_size):
            for group in groups[rank:] + groups[:rank]:
                calls += [call(group[rank], count) for _ in range(5)]
        await check(calls, world_size)


async def test_freed_slot_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_freed_slots(monkeypatch)
    async with jobs(3) as (pgs,):
        for count in COUNTS:
            await check([call(pg, count) for pg in pgs], 3)


@pytest.mark.parametrize("count", [1, 600])
async def test_keyed_calls_finish_although_ranks_start_in_opposite_orders(count: int) -> None:
    keys = [str(number) for number in range(200)]
    async with jobs(2) as ((zero, one),):
        calls = [call(zero, count, key) for key in keys]
        calls += [call(one, count, key) for key in reversed(keys)]
        await check(calls, 2)


@pytest.mark.ranks(2, 3, 4, 7)
@parametrize_transports("shm")
@pytest.mark.parametrize("count", [*COUNTS, 100_000])
@pytest.mark.parametrize("linked", [False, True])
async def test_rank_can_leave_as_soon_as_it_has_its_result(pg: ProcessGroup, count: int, linked: bool) -> None:
    array = rank_array(pg, count)
    if linked:
        await pg.allreduce(np.zeros(1))
    await pg.allreduce(array)
    assert (array == 2.0 ** pg.size() - 1).all()


# -- failed groups


async def shrunk_groups(pgs: list[ProcessGroup]) -> list[ProcessGroup]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(pg.shrink() for pg in pgs))


async def check_failure(work: Work[object]) -> None:
    with pytest.raises(GroupError):
        await work


async def check_free_slots(pgs: list[ProcessGroup]) -> None:
    """Check that all slots are free: rank 0 can post to every slot before rank 1 reads any slot."""
    zero, one = pgs
    for count, slots in ((1, SMALL_SLOTS), (8192, MIDDLE_SLOTS)):
        before = posts(zero, 1)
        calls = [call(zero, count) for _ in range(slots)]
        assert posts(zero, 1) - before == slots
        await check(calls + [call(one, count) for _ in range(slots)], 2)


async def test_slots_posted_for_a_failed_group_are_freed() -> None:
    async with jobs(2) as (pgs,):
        works = [call(pgs[0], count)[1] for count in (1, 8192) for _ in range(SMALL_SLOTS)]
        pgs[0].abort("a test")
        for work in works:
            await check_failure(work)
        groups = await shrunk_groups(pgs)
        await check_free_slots(groups)
        await asyncio.gather(*(pg.shutdown() for pg in groups))


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 17])
async def test_barrier_waits_for_all_ranks(world_size: int) -> None:
    async with jobs(world_size) as (pgs,):
        for late in (0, world_size - 1):
            works = [pg.barrier() for pg in pgs if pg.rank() != late]
            for _ in range(50):
                await asyncio.sleep(0)
            assert not any(work.done() for work in works)
            works.append(pgs[late].barrier())
            await asyncio.gather(*(work.join() for work in works))


async def test_barrier_received_in_frames_frees_no_slot() -> None:
    """Use a barrier that needs the slot of an earlier gather, which the root has not read yet."""
    async with jobs(2) as (pgs,):
        root, peer = pgs
        number = comm_of(root).entered + 1
        key = next(key for key in map(str, range(10_000)) if (hash62(f"{key}\0{1}") - number) % SMALL_SLOTS == 0)
        gather = peer.gather(None, rank_array(peer), 0, key=key)
        await asyncio.gather(peer.barrier(), root.barrier())
        outputs = [np.zeros(3), np.zeros(3)]
        async with asyncio.timeout(20):
            await root.gather(outputs, rank_array(root), 0, key=key)
            await gather
        assert [output.tolist() for output in outputs] == [[1] * 3, [2] * 3]
        shared = comm_of(root).channels[1].shared
        assert shared is not None
        assert shared.peer_outbox.unread() == []
