"""Small gathers, scatters and alltoalls through shared-memory slots, alone and together with large blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, ProcessGroup
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.engine.operations.shm_ring import ShmRing
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.native import core
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.work import Work

from ..internals import comm_of
from ..ranks import parametrize_transports
from .test_slot_program import Started, finish, jobs, overwrite_freed_slots, posts, until_revoked

#: A number of float64 elements that exceeds every slot.
LARGE = 8193
#: Block lengths in float64 elements: empty, for the 64-byte line of a slot, small slots, middle slots, and frames.
COUNTS = [0, 1, 5, 6, 512, 513, 8192, LARGE]

#: A function that starts a call with element counts and a root; alltoall ignores the root.
Call = Callable[..., Started]
#: A function (rank, rank) that returns the number of elements that the first rank sends to the second rank.
Counts = Callable[[int, int], int]


def block(count: int, source: int, target: int) -> np.ndarray:
    """Return the block that rank `source` sends to rank `target`."""
    return np.full(count, 100.0 * source + target)


def gather(pg: ProcessGroup, count: Counts, root: int, key: str | None = None) -> Started:
    rank, size = pg.rank(), pg.size()
    outputs = [np.zeros(count(peer, root)) for peer in range(size)] if rank == root else None
    work = pg.gather(outputs, block(count(rank, root), rank, root), root, key=key)

    def check() -> None:
        for peer, output in enumerate(outputs or ()):
            assert output.tolist() == block(count(peer, root), peer, root).tolist()

    return work, check


def scatter(pg: ProcessGroup, count: Counts, root: int, key: str | None = None) -> Started:
    rank, size = pg.rank(), pg.size()
    output = np.zeros(count(root, rank))
    inputs = [block(count(root, peer), root, peer) for peer in range(size)] if rank == root else None
    work = pg.scatter(output, inputs, root, key=key)
    return work, lambda: _check_equal(output, block(count(root, rank), root, rank))


def alltoall(pg: ProcessGroup, count: Counts, root: int, key: str | None = None) -> Started:
    rank, size = pg.rank(), pg.size()
    outputs = [np.zeros(count(peer, rank)) for peer in range(size)]
    work = pg.alltoall(outputs, [block(count(rank, peer), rank, peer) for peer in range(size)], key=key)

    def check() -> None:
        for peer, output in enumerate(outputs):
            _check_equal(output, block(count(peer, rank), peer, rank))

    return work, check


def _check_equal(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.tolist() == expected.tolist()


CALLS = pytest.mark.parametrize("call", [gather, scatter, alltoall])


def executors(pgs: list[ProcessGroup]) -> set[type]:
    return {type(operation) for pg in pgs for operation in comm_of(pg).in_flight.pending}


def executor_of_large(world_size: int) -> type:
    return ShmRing if core is not None and world_size == 2 else ProgramExecutor


@CALLS
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
async def test_small_blocks_are_sent_through_slots(call: Call, world_size: int) -> None:
    async with jobs(world_size) as (pgs,):
        for count in COUNTS:
            for root in range(world_size):
                before = sum(posts(pg, peer) for pg in pgs for peer in comm_of(pg).others)
                calls = [call(pg, lambda a, b, count=count: count, root) for pg in pgs]
                assert executors(pgs) <= {SlotProgram if count < LARGE else executor_of_large(world_size)}
                await finish(calls)
                after = sum(posts(pg, peer) for pg in pgs for peer in comm_of(pg).others)
                messages = (world_size - 1) * (world_size if call is alltoall else 1)
                is_posted = count > 0 or call is gather  # of empty blocks, only those of a gather are posted
                assert after - before == (messages if is_posted and count < LARGE else 0)


@CALLS
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
async def test_small_blocks_use_slots_even_if_other_blocks_are_large(call: Call, world_size: int) -> None:
    """Check ranks that exchange large blocks in frames, and receive their small blocks through slots or in frames."""
    seen = set()
    async with jobs(world_size) as (pgs,):
        for large in range(world_size):
            for root in range(world_size):
                # Blocks between `large` and the next rank are large. All other blocks are small or empty.
                pair = {large, (large + 1) % world_size}
                calls = [
                    call(pg, lambda a, b, pair=pair: LARGE * 3 if {a, b} == pair else (a + 2 * b) % 3 * 300, root)
                    for pg in pgs
                ]
                seen |= executors(pgs)
                await finish(calls)
    expected = {ProgramExecutor, SlotProgram} if world_size > 2 else {executor_of_large(world_size)}
    assert seen >= expected - ({ProgramExecutor} if call is scatter else set()), (
        f"missing executors; the root of a scatter finishes before it is seen: {seen}"
    )


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("late", [False, True])
async def test_gather_root_without_counts_receives_all_blocks(world_size: int, late: bool) -> None:
    """Let the root call first or last, with blocks in small slots, in middle slots and in frames."""
    async with jobs(world_size) as (pgs,):
        for root in range(world_size):
            for first in range(len(COUNTS)):
                blocks = [block(COUNTS[(first + rank) % len(COUNTS)], rank, root) for rank in range(world_size)]
                works: dict[int, Work[Any]] = {}
                for pg in sorted(pgs, key=lambda pg, root=root: (pg.rank() == root) == late):
                    works[pg.rank()] = pg.gather(None, blocks[pg.rank()], root)
                async with asyncio.timeout(20):
                    outputs = await works.pop(root)
                    await asyncio.gather(*(work.join() for work in works.values()))
                for found, expected in zip(outputs, blocks, strict=True):
                    _check_equal(found, expected)


async def test_gather_root_without_counts_does_not_read_a_freed_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_freed_slots(monkeypatch)
    async with jobs(2) as ((zero, one),):
        for count in COUNTS:
            work = zero.gather(None, block(1, 0, 0), 0)
            async with asyncio.timeout(20):
                await one.gather(None, block(count, 1, 0), 0)
                _check_equal((await work)[1], block(count, 1, 0))


async def test_peer_whose_contribution_has_arrived_is_not_reported_as_awaited() -> None:
    """Check a call that also has large blocks, and a gather whose root does not know the lengths of the blocks."""
    async with jobs(3) as (pgs,):
        for start in (
            lambda pg: alltoall(pg, lambda a, b: 3 if 2 in (a, b) else LARGE, 0),
            lambda pg: (pg.gather(None, block(3, pg.rank(), 0), 0), lambda: None),
        ):
            first = start(pgs[0])
            (operation,) = comm_of(pgs[0]).in_flight.pending
            assert operation.needs(2)
            second = start(pgs[2])
            assert not operation.needs(2)
            await finish([first, start(pgs[1]), second])


async def test_gather_root_without_counts_reports_a_mismatched_post() -> None:
    async with jobs(2) as ((zero, one),):
        one.gather(None, np.zeros(3, np.int64), 0)
        work = zero.gather(None, np.zeros(3), 0)
        async with asyncio.timeout(20):
            with pytest.raises(GroupError) as caught:
                await work
        assert isinstance(caught.value, CollectiveMismatchError)


@CALLS
@pytest.mark.ranks(3)
@parametrize_transports("shm")
@pytest.mark.parametrize("counts", [[1, 1, 1], [0, 513, 2], [LARGE, 1, 600]])
async def test_calls_before_a_shared_memory_link_exists_use_frames(
    call: Call, counts: list[int], pg: ProcessGroup
) -> None:
    calls = [call(pg, lambda a, b: counts[(a + b) % 3], number % 3) for number in range(20)]
    await finish(calls)


@CALLS
@pytest.mark.parametrize(("count", "slots"), [(1, SMALL_SLOTS), (513, MIDDLE_SLOTS)])
@pytest.mark.parametrize("root", [0, 1])
async def test_full_slots_do_not_delay_calls(call: Call, count: int, slots: int, root: int) -> None:
    async with jobs(2) as (pgs,):
        first = pgs[1 - root] if call is gather else pgs[root]
        last = pgs[1 - first.rank()]
        before = posts(first, last.rank())
        calls = [call(first, lambda a, b: count, root) for _ in range(3 * slots)]
        assert posts(first, last.rank()) - before == slots
        calls += [call(last, lambda a, b: count, root) for _ in range(3 * slots)]
        await finish(calls)
        assert first.pending() == last.pending() == []


@pytest.mark.parametrize("unsized", [False, True])
async def test_slot_is_reused_after_its_contribution_was_read(unsized: bool) -> None:
    """Let the reader make a call that also has large blocks, or a gather without the lengths of the blocks."""
    async with jobs(3) as (pgs,):
        before = posts(pgs[1], 0)
        for _ in range(SMALL_SLOTS + 3):
            if unsized:
                calls = [(pg.gather(None, block(3, pg.rank(), 0), 0), lambda: None) for pg in pgs]
            else:
                calls = [alltoall(pg, lambda a, b: 3 if 1 in (a, b) else LARGE, 0) for pg in pgs]
            await finish(calls)
        assert posts(pgs[1], 0) - before == SMALL_SLOTS + 3


@CALLS
@pytest.mark.parametrize("root", [0, 1])
async def test_keyed_calls_finish_although_ranks_start_in_opposite_orders(call: Call, root: int) -> None:
    keys = [str(number) for number in range(100)]
    async with jobs(2) as ((zero, one),):
        calls = [call(zero, lambda a, b: 3, root, key) for key in keys]
        calls += [call(one, lambda a, b: 3, root, key) for key in reversed(keys)]
        await finish(calls)


@CALLS
async def test_freed_slot_is_not_read_again(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_freed_slots(monkeypatch)
    async with jobs(3) as (pgs,):
        for counts in ([1, 1, 1], [5, 600, 7], [1, 600, LARGE]):
            for root in range(3):
                await finish([call(pg, lambda a, b, counts=counts: counts[(a + b) % 3], root) for pg in pgs])


@CALLS
async def test_calls_of_subgroups_give_the_closed_form_results(call: Call) -> None:
    async with jobs(4) as (pgs,):
        groups = [await pg.split_group([[0, 2], [1, 3]]) for pg in pgs]
        for root in (0, 1):
            await finish([call(group, lambda a, b: 4 + a + b, root) for group in groups])


#: Pairs of different lengths that ranks 0 and 1 pass for the block between them.
DIFFERENT = [(3, 4), (3, 0), (0, 3), (3, 600), (600, 3), (LARGE, 3), (3, LARGE)]


@CALLS
async def test_mismatched_counts_are_reported(call: Call) -> None:
    """Let ranks 0 and 1 pass different counts, while rank 2 exchanges small or large blocks."""

    async def differ(counts: tuple[int, int], large: bool) -> None:
        async with jobs(3) as (pgs,):
            works = []
            for pg in pgs:

                def count(a: int, b: int, mine: int = counts[pg.rank() % 2]) -> int:
                    return mine if {a, b} == {0, 1} else LARGE * large + 1

                works.append(call(pg, count, 0)[0])
            await until_revoked(*pgs)
            await asyncio.gather(*works, return_exceptions=True)
            for pg in pgs:
                with pytest.raises(GroupError) as caught:
                    pg.barrier()
                assert isinstance(caught.value.__cause__, CollectiveMismatchError), counts

    await asyncio.gather(*(differ(counts, large) for counts in DIFFERENT for large in (False, True)))


@CALLS
async def test_failed_group_frees_its_slots_for_other_groups(call: Call) -> None:
    async with jobs(2, "ab") as ((a_zero, a_one), (b_zero, b_one)):
        for root in (0, 1):
            call(a_one, lambda a, b: 1, root)[0].add_done_callback(lambda work: work.exception())
        a_one.abort("enough")
        await until_revoked(a_zero)
        for root in (0, 1):
            await finish([call(pg, lambda a, b: 1, root) for pg in (b_zero, b_one) for _ in range(SMALL_SLOTS)])
