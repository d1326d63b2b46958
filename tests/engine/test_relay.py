"""Large reductions through chunk queues: the order of chunks, and operations that compete for a queue."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, ProcessGroup, ReduceOp
from aiocoll.engine.operations.shm_ring import LAG, ShmRing, order

from ..internals import Limits, comm_of, disable_accelerator
from ..ranks import parametrize_transports, wait_until
from ..shared_memory import QUEUE
from .test_slot_program import call, check, check_failure, jobs, rank_array, shrunk_groups

MIB = 1024 * 1024
#: Number of float64 elements in a chunk, and number of chunks in a chunk queue.
PIECE, CHUNKS = QUEUE.chunk_nbytes // 8, QUEUE.chunks_count
#: Number of chunks in a short queue, which two operations can fill.
FEW = 4


@pytest.fixture(autouse=True)
def _no_stall_reports(limits: Limits) -> None:
    """Disable stall reports, so that only the awaited data wakes a waiting rank.

    Also lift the time budget, so that an operation does all it can at each look, even on a slow machine.
    """
    limits(report_after=1000.0, loop_budget=100.0)


@pytest.mark.parametrize("pieces", range(1, 10))
@pytest.mark.parametrize("steps", range(2, 9))
def test_relay_schedule_contains_each_chunk_once_after_its_dependencies(steps: int, pieces: int) -> None:
    found = order(steps, pieces)
    assert sorted(each[:2] for each in found) == [(step, piece) for step in range(steps) for piece in range(pieces)]
    for number, (step, piece, before) in enumerate(found):
        if step == 0:
            assert before == -1
        else:
            assert found[before][:2] == (step - 1, piece)
            assert before < number
    for step in range(steps):
        order_of_step = [piece for each, piece, _ in found if each == step]
        assert all(one < other for one, other in pairwise(order_of_step))
    # All ranks need the same order: without the cache, `order` must return equal results for equal arguments.
    assert order.__wrapped__(steps, pieces) == found


@pytest.mark.parametrize("pieces", range(1, 10))
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_relay_schedule_does_not_deadlock_with_the_chunks_of_a_queue(world_size: int, pieces: int) -> None:
    """Simulate the worst case: each rank makes all possible progress before the next rank runs."""
    found = order(2 * (world_size - 1), pieces)
    put, taken = [0] * world_size, [0] * world_size
    moved = True
    while moved:
        moved = False
        for rank in range(world_size):
            progressed = True
            while progressed:
                progressed = False
                free = put[rank] - taken[(rank + 1) % world_size] < CHUNKS
                if put[rank] < len(found) and found[put[rank]][2] < taken[rank] and free:
                    put[rank] += 1
                    progressed = moved = True
                if taken[rank] < put[rank - 1]:
                    taken[rank] += 1
                    progressed = moved = True
    assert put == taken == [len(found)] * world_size


def pieces_put(pg: ProcessGroup, peer: int) -> int:
    """Return the number of chunks that this rank has put into the chunk queue to `peer`."""
    shared = comm_of(pg).channels[peer].shared
    assert shared is not None
    return shared.chunks.number


def holds_queue(pg: ProcessGroup) -> list[bool]:
    return [operation._holds for operation in comm_of(pg).in_flight.pending if isinstance(operation, ShmRing)]


def look(pg: ProcessGroup) -> None:
    """Let this rank make all progress that is possible without the other ranks."""
    while any(operation.look() for operation in list(comm_of(pg).in_flight.pending) if isinstance(operation, ShmRing)):
        pass


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("count", [PIECE + 1, 4 * PIECE - 1, 4 * PIECE, 4 * PIECE + 1, 500_000])
async def test_large_arrays_are_sent_through_the_chunk_queue(world_size: int, count: int) -> None:
    async with jobs(world_size) as (pgs,):
        calls = [call(pg, count) for pg in pgs]
        longest = -(-count // world_size)
        await check(calls, world_size)
        pieces = 2 * (world_size - 1) * -(-longest // PIECE)
        assert [pieces_put(pg, (pg.rank() + 1) % world_size) for pg in pgs] == [pieces] * world_size


@pytest.mark.ranks(2, 3, 4, 7)
@parametrize_transports("shm")
async def test_large_arrays_are_sent_in_frames_until_a_link_exists(pg: ProcessGroup) -> None:
    calls = []
    for _ in range(4):
        calls.append(call(pg, 300_000))
        await asyncio.sleep(0)
    await check(calls, pg.size())


@pytest.mark.parametrize("world_size", [2, 3])
async def test_array_pieces_larger_than_a_chunk_are_sent_in_frames(world_size: int) -> None:
    """Use a link with a smaller chunk size than the ranks have announced."""
    async with jobs(world_size) as (pgs,):
        for pg in pgs:
            disable_accelerator(pg)
            for peer in comm_of(pg).others:
                shared = comm_of(pg).channels[peer].shared
                assert shared is not None
                shared.chunks.writer.nbytes //= 2
        await check([call(pg, 300_000) for pg in pgs], world_size)
        assert [pieces_put(pg, (pg.rank() + 1) % world_size) for pg in pgs] == [0] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
async def test_chunk_queue_is_used_by_one_operation_while_other_operations_use_frames(world_size: int) -> None:
    async with jobs(world_size) as (pgs,):
        calls = [call(pg, 300_000) for pg in pgs for _ in range(3)]
        assert all(holds.count(True) <= 1 for holds in map(holds_queue, pgs))
        await check(calls, world_size)
        # These calls complete only if the chunk queue is free again.
        calls = [call(pg, 300_000) for pg in pgs]
        assert all(holds == [True] for holds in map(holds_queue, pgs))
        await check(calls, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
async def test_chunks_of_a_rank_that_has_left_are_still_read(world_size: int, limits: Limits) -> None:
    """Let rank 0 finish and leave before its peers have read all of rank 0's chunks."""
    async with jobs(world_size) as (pgs,):
        limits(loop_budget=-1.0)
        calls = [call(pg, 300_000) for pg in pgs]
        first, *others = (operation for pg in pgs for operation in comm_of(pg).in_flight.pending)
        while not first.done:
            look(pgs[0])
            for operation in others:
                while operation._put_next():
                    pass
            look(pgs[0])
            if not first.done:
                for operation in others:
                    operation._take_next()
        assert not others[0].done
        comm_of(pgs[1]).on_departure(0)
        assert others[0].done
        await check(calls, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
async def test_chunk_queue_is_used_by_several_groups_in_turn(world_size: int) -> None:
    async with jobs(world_size, "abc") as groups:
        calls = []
        for rank in range(world_size):
            for group in groups[rank:] + groups[:rank]:
                calls += [call(group[rank], 300_000), call(group[rank])]
        await check(calls, world_size)


@pytest.mark.parametrize("tasks", [False, True], ids=["calls", "tasks"])
async def test_large_keyed_calls_finish_in_opposite_orders(tasks: bool) -> None:
    count = 64 * MIB // 8

    async def rank(pg: ProcessGroup) -> None:
        keys = "ab" if pg.rank() else "ba"
        arrays = [rank_array(pg, count) for _ in keys]
        if tasks:
            async with asyncio.TaskGroup() as group:
                for key, array in zip(keys, arrays, strict=True):
                    group.create_task(pg.allreduce(array, key=key).join())
        else:
            for work in [pg.allreduce(array, key=key) for key, array in zip(keys, arrays, strict=True)]:
                await work
        assert all((array == 3).all() for array in arrays)

    async with jobs(2) as (pgs,):
        await asyncio.gather(*(rank(pg) for pg in pgs))


class GatedLink:
    """A link that accepts a first frame, and further frames only while the attribute `open` is set."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.open = False
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    @property
    def writable(self) -> bool:
        return self.open or not self._taken

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        self._taken += 1
        return self._link.write(header, payload)


async def test_relay_completes_when_its_last_frame_arrives() -> None:
    async with jobs(2) as ((zero, one),):
        channel = comm_of(zero).channels[1]
        gate = channel.link = GatedLink(channel.link)  # type: ignore[assignment]
        calls = [call(zero, 2 * PIECE), call(one, 2 * PIECE)]
        (operation,) = comm_of(zero).in_flight.pending
        await wait_until(lambda: not operation.awaited_ranks())
        assert not calls[0][1].done()
        gate.open = True
        channel.drained(gate)
        assert calls[0][1].done()
        await check(calls, 2)


async def test_waiting_relay_has_no_runnable_step() -> None:
    async with jobs(2) as ((zero, one),):
        calls = [call(zero, 10 * PIECE)]
        (waiting,) = comm_of(zero).in_flight.pending
        assert isinstance(waiting, ShmRing)
        assert waiting.look() is False
        await check([*calls, call(one, 10 * PIECE)], 2)


async def test_unread_chunks_of_an_early_operation_delay_no_other_operation() -> None:
    async with jobs(2) as ((zero, one),):
        held = [call(zero, 300_000, "later")]
        assert holds_queue(zero) == [True]
        calls = [call(pg, 300_000) for _ in range(3) for pg in (zero, one)]
        await check(calls, 2)
        await check([*held, call(one, 300_000, "later")], 2)


# -- failed groups


async def check_free_queue(pgs: list[ProcessGroup]) -> None:
    """Check that large reductions can use the chunk queue and complete."""
    for _ in range(2):
        calls = [call(pg, 300_000) for pg in pgs]
        assert [holds_queue(pg) for pg in pgs] == [[True]] * len(pgs)
        await check(calls, len(pgs))


async def test_next_ordered_call_queues_its_chunks_behind_unread_chunks() -> None:
    async with jobs(2) as (pgs,):
        for pg in pgs:
            disable_accelerator(pg)
        # Rank 0 has put all its chunks of the first call into the queue, and rank 1 has not read any chunk.
        calls = [call(pgs[1], PIECE + 1), call(pgs[0], PIECE + 1), call(pgs[0], 300_000)]
        assert holds_queue(pgs[0])[-1]
        await check([*calls, call(pgs[1], 300_000)], 2)


async def test_chunks_of_a_failed_group_are_freed() -> None:
    async with jobs(2) as (pgs,):
        _, work = call(pgs[0], 10 * PIECE)
        assert pieces_put(pgs[0], 1) == LAG
        pgs[0].abort("a test")
        await check_failure(work)
        groups = await shrunk_groups(pgs)
        await check_free_queue(groups)
        await asyncio.gather(*(pg.shutdown() for pg in groups))


async def test_chunks_queued_after_the_peer_has_failed_block_no_other_group() -> None:
    async with jobs(2) as (pgs,):
        count = PIECE + 1
        lost = [call(pgs[1], count)[1]]
        pgs[1].abort("a test")
        # Rank 0 finds the chunk of rank 1 and queues all its own chunks, so rank 0 no longer needs the chunk queue.
        lost.append(call(pgs[0], count)[1])
        assert pieces_put(pgs[0], 1) == 2
        for work in lost:
            await check_failure(work)
        groups = await shrunk_groups(pgs)
        await check([call(pg, 300_000) for pg in groups], 2)
        await check_free_queue(groups)
        await asyncio.gather(*(pg.shutdown() for pg in groups))


@pytest.fixture
def _short_queues(limits: Limits) -> None:
    """Limit each chunk queue to `FEW` chunks."""
    if CHUNKS > FEW:
        limits(chunk_count=FEW)


@pytest.mark.usefixtures("_short_queues")
async def test_writer_that_waits_for_a_free_chunk_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the wake-up messages, which only ranks in other processes need: ranks of one loop find free chunks."""
    async with jobs(2) as (pgs,):
        for pg in pgs:
            disable_accelerator(pg)
        calls = [call(pgs[1], 6 * PIECE), call(pgs[0], 6 * PIECE)]
        look(pgs[0])
        full = pieces_put(pgs[0], 1) == FEW
        link = comm_of(pgs[1]).channels[0].shared
        assert link is not None
        put, announce = [pieces_put(pgs[1], 0)], link.announce
        monkeypatch.setattr(link, "announce", lambda: (put.append(pieces_put(pgs[1], 0)), announce()))
        look(pgs[1])
        await check(calls, 2)
        assert full
        # Only one announcement comes without a new chunk: the announcement of the first freed chunk.
        assert [one == other for one, other in pairwise(put)].count(True) == 1


@pytest.mark.usefixtures("_short_queues")
async def test_writer_that_waits_behind_chunks_of_a_failed_group_is_woken() -> None:
    async with jobs(2, "ab") as (a, b):
        for pg in (*a, *b):
            disable_accelerator(pg)
        count = 2 * PIECE + 1
        # Rank 0 puts all its chunks of the first group into the chunk queue, and then a chunk of the second group.
        calls = [call(a[1], count), call(a[0], count)]
        (reader,) = comm_of(a[1]).in_flight.pending
        assert isinstance(reader, ShmRing)
        assert reader._take_next()
        later = call(b[0], 300_000)
        assert holds_queue(b[0]) == [True]
        assert pieces_put(b[0], 1) == FEW + 1
        a[1].abort("a test")
        for _, work in calls:
            await check_failure(work)
        await check([later, call(b[1], 300_000)], 2)


@pytest.mark.parametrize("world_size", [2, 3])
async def test_chunk_queue_stays_usable_after_a_reduce_function_raises(world_size: int) -> None:
    def bad(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        raise ZeroDivisionError("bad")

    async with jobs(world_size) as (pgs,):
        works = [call(pg, 300_000, "sum")[1] for pg in pgs[1:]]
        for pg in pgs:
            try:
                works.append(pg.allreduce(rank_array(pg, 300_000), ReduceOp.custom(bad)))
            except Exception:  # the group has already failed
                assert works
        for work in works:
            await check_failure(work)
        groups = await shrunk_groups(pgs)
        await check([call(pg, 300_000) for pg in groups], world_size)
        await check_free_queue(groups)
        await asyncio.gather(*(pg.shutdown() for pg in groups))


@pytest.mark.parametrize("world_size", [2, 3])
async def test_mismatch_error_from_the_chunk_queue_names_both_calls(world_size: int) -> None:
    """Check that the chunk headers reveal the mismatch before all ranks have reported their operations."""
    async with jobs(world_size) as (pgs,):
        works = [pg.allreduce(rank_array(pg, 300_000), ReduceOp.MAX if pg.rank() else ReduceOp.SUM) for pg in pgs]
        assert holds_queue(pgs[0]) == [True]
        for work in works:
            with pytest.raises(CollectiveMismatchError, match=r"rank 0 called ALLREDUCE.*SUM.*; rank \d called .*MAX"):
                async with asyncio.timeout(20):
                    await work
