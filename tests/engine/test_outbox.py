"""Contributions posted once for several readers; a late reader makes groups use frames instead of waiting."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from aiocoll import PeerProtocolError, ProcessGroup, ProtocolError
from aiocoll.engine.operations.slots import Slots
from aiocoll.transport.shared_memory import SMALL_SLOTS
from aiocoll.transport.shm.slots import CommonWriter

from ..internals import comm_of, use_same_slots
from ..ranks import wait_until
from .test_slot_program import call, check, check_failure, jobs, posts


def common_lane(pg: ProcessGroup) -> CommonWriter:
    """Return the writer of a rank's common lane, the shared memory that all other ranks read."""
    shared = next(channel.shared for channel in comm_of(pg).channels if channel.shared is not None)
    writer = shared.common_writer
    assert isinstance(writer, CommonWriter)
    return writer


def common_posts(pg: ProcessGroup) -> int:
    """Return how often a rank has posted to its common lane."""
    return sum(common_lane(pg).posted)


@pytest.mark.parametrize(("world_size", "uses"), [(2, 0), (3, 1), (4, 1)])
async def test_contribution_for_several_readers_is_written_to_shared_memory_once(world_size: int, uses: int) -> None:
    """Check that a contribution uses the common lane once, or the lane of its reader if there is only one reader."""
    async with jobs(world_size) as (pgs,):
        before = [common_posts(pg) for pg in pgs]
        await check([call(pg) for pg in pgs], world_size)
        assert [common_posts(pg) - old for pg, old in zip(pgs, before, strict=True)] == [uses] * world_size


@pytest.mark.parametrize(("nbytes", "uses"), [(1 << 16, 1), ((1 << 16) + 8, 0)])
async def test_largest_contribution_size_does_not_depend_on_the_number_of_readers(nbytes: int, uses: int) -> None:
    async with jobs(8) as (pgs,):
        before = [common_posts(pg) for pg in pgs]
        works = [pg.broadcast(np.full(nbytes // 8, float(pg.rank())), 3) for pg in pgs]
        for work in works:
            assert (await work == 3).all()
        assert sum(common_posts(pg) for pg in pgs) - sum(before) == uses


async def test_rank_0_reads_all_contributions_and_posts_the_result_once() -> None:
    async with jobs(6) as (pgs,):
        before = [common_posts(pg) for pg in pgs]
        await check([call(pg) for pg in pgs], 6)
        assert [common_posts(pg) - old for pg, old in zip(pgs, before, strict=True)] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["gather", "scatter", "alltoall", "reduce_scatter"])
async def test_blocks_for_single_ranks_do_not_use_the_common_lane(kind: str) -> None:
    async with jobs(3) as (pgs,):
        before = sum(common_posts(pg) for pg in pgs)

        async def rank(pg: ProcessGroup) -> None:
            blocks = [np.full(2, float(pg.rank())) for _ in pgs]
            mine = np.zeros(2)
            if kind == "gather":
                await pg.gather(blocks if pg.rank() == 0 else None, mine, 0)
            elif kind == "scatter":
                await pg.scatter(mine, blocks if pg.rank() == 0 else None, 0)
            elif kind == "alltoall":
                await pg.alltoall([np.zeros(2) for _ in pgs], blocks)
            else:
                await pg.reduce_scatter(mine, blocks)

        await asyncio.gather(*(rank(pg) for pg in pgs))
        assert sum(common_posts(pg) for pg in pgs) == before


@pytest.mark.parametrize("count", [1, 512])
async def test_late_reader_makes_other_groups_use_frames_instead_of_waiting(count: int) -> None:
    async with jobs(3, "ab") as (a, b):
        late = [call(pg, count) for pg in a[:2] for _ in range(SMALL_SLOTS)]
        before = common_posts(a[0])
        for _ in range(3):
            await check([call(pg, count) for pg in b], 3)
        assert common_posts(a[0]) == before, "a slot of the common lane was used before rank 2 had read it"
        late += [call(a[2], count) for _ in range(SMALL_SLOTS)]
        await check(late, 3)
        await check([call(pg, count) for pg in b], 3)
        assert common_posts(a[0]) == before + 1


async def test_two_jobs_of_one_process_have_separate_outboxes() -> None:
    async with jobs(3) as (a,), jobs(3) as (b,):
        assert common_lane(a[0]) is not common_lane(b[0])
        before = common_posts(b[0])
        late = [call(pg) for pg in a[:2] for _ in range(SMALL_SLOTS)]
        await check([call(pg) for pg in b], 3)
        assert common_posts(b[0]) == before + 1, "unread posts of another job occupy slots of this job"
        await check([*late, *(call(a[2]) for _ in range(SMALL_SLOTS))], 3)


async def test_readers_without_a_link_receive_a_frame_and_other_readers_use_a_slot() -> None:
    """Make a call while one link is still being opened, so that its channel has no shared memory yet."""
    async with jobs(3) as (pgs,):
        channel = comm_of(pgs[0]).channels[2]
        shared, channel.shared = channel.shared, None
        before = [posts(pgs[0], 1), common_posts(pgs[0])]
        calls = [call(pg) for pg in pgs[:2]]
        channel.shared = shared
        calls.append(call(pgs[2]))
        await check(calls, 3)
        assert [posts(pgs[0], 1), common_posts(pgs[0])] == [each + 1 for each in before]


async def test_rank_that_has_left_a_group_blocks_no_slot() -> None:
    async with jobs(3, "ab") as (a, b):
        array = np.ones(3)
        works = [a[0].broadcast(array, 0) for _ in range(SMALL_SLOTS)]
        await asyncio.gather(*works)
        lane = comm_of(a[0]).channels[2].shared.lane_writer  # type: ignore[union-attr]
        assert any(lane in readers for readers in common_lane(a[0])._readers)
        identity = comm_of(a[0]).id
        await a[2].shutdown()
        await wait_until(lambda: comm_of(a[0]).left)
        lines = common_lane(a[0])._lines
        assert not any(
            lane in readers and lines[(slot << 3) + 1] == identity
            for slot, readers in enumerate(common_lane(a[0])._readers)
        )
        for _ in range(SMALL_SLOTS):
            await a[1].broadcast(array, 0)
        before = common_posts(a[0])
        await check([call(pg) for pg in b], 3)
        assert common_posts(a[0]) == before + 1


async def test_failed_group_blocks_no_slot() -> None:
    async with jobs(3, "ab") as (a, b):
        works = [call(pg)[1] for pg in a[:2] for _ in range(SMALL_SLOTS)]
        a[0].abort("a test")
        for work in works:
            await check_failure(work)
        async with asyncio.timeout(20):
            await asyncio.gather(*(pg.wait_revoked() for pg in a))
        before = common_posts(b[0])
        await check([call(pg) for pg in b], 3)
        assert common_posts(b[0]) == before + 1


@pytest.mark.parametrize("nbytes", [1 << 15, 1 << 40, (1 << 64) - 1])
async def test_impossible_slot_length_is_refused_with_an_error_that_names_the_rank(nbytes: int) -> None:
    async with jobs(2) as (pgs,):
        posted = pgs[1].gather(None, np.ones(3), 0)
        lines = comm_of(pgs[1]).channels[0].shared.lane_writer._lines  # type: ignore[union-attr]
        for slot in range(SMALL_SLOTS):
            lines[(slot << 3) + 2] = nbytes
        with pytest.raises(PeerProtocolError, match=f"rank 1 posted {nbytes} bytes to a slot of 4096") as raised:
            await pgs[0].gather(None, np.ones(3), 0)
        assert raised.value.ranks == (1,)
        await posted


async def test_partial_element_in_a_slot_is_refused_with_an_error_that_names_the_rank() -> None:
    async with jobs(2) as (pgs,):
        await pgs[1].gather(None, np.ones(3), 0)
        lines = comm_of(pgs[1]).channels[0].shared.lane_writer._lines  # type: ignore[union-attr]
        for slot in range(SMALL_SLOTS):
            lines[(slot << 3) + 2] = 23
        with pytest.raises(ProtocolError, match="rank 1 sent 23 bytes, which is not a multiple of the size of float64"):
            await pgs[0].gather(None, np.ones(3), 0)


@pytest.mark.parametrize("seed", range(4))
async def test_overlapping_groups_may_call_in_any_order(seed: int) -> None:
    """Let each rank make its calls in random order, with arrays for small slots, for middle slots and for frames."""
    chance = random.Random(seed)
    members = [(0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 3), (0, 2, 3), (1, 2, 3)]
    sizes = [chance.choice([1, 5, 100, 513, 2000]) for _ in range(12)]
    async with jobs(4) as (pgs,):

        async def rank(pg: ProcessGroup) -> None:
            me, order = pg.rank(), random.Random(seed * 10 + pg.rank())
            groups = [await pg.split_group(list(ranks)) for ranks in members]
            mine = [number for number, ranks in enumerate(members) if me in ranks]
            for number in mine:
                use_same_slots(groups[number])
            calls = [(number, size) for number in mine for size in range(len(sizes))]
            order.shuffle(calls)
            works = []
            for number, size in calls:
                group = groups[number]
                assert group is not None
                array = np.full(sizes[size], 2.0**me)
                works.append((array, group.allreduce(array, key=str(size)), members[number]))
                if order.random() < 0.3:
                    await asyncio.sleep(0)
            async with asyncio.timeout(30):
                for array, work, ranks in works:
                    await work
                    assert (array == sum(2.0**each for each in ranks)).all()
            await asyncio.gather(*(group.shutdown() for group in groups if group is not None))

        await asyncio.gather(*(rank(pg) for pg in pgs))


async def test_groups_that_call_alternately_use_different_slots() -> None:
    """Let ranks post for two groups with the same call numbers, before the last rank reads a post of either group."""
    async with jobs(3, "abcd") as groups:
        shifts = {comm_of(group[0]).id % SMALL_SLOTS: group for group in groups}
        assert len(shifts) > 1, "all four group ids select the same slots, by a chance of one in two million"
        one, other, *_ = shifts.values()
        for pg in (*one, *other):
            comm_of(pg).slots = Slots(comm_of(pg).channels, comm_of(pg).id, comm_of(pg).chunk_nbytes)
        before = common_posts(one[0])
        calls = [call(pg) for group in (one, other) for pg in group[:2]]
        assert common_posts(one[0]) == before + 2
        await check([*calls, *(call(group[2]) for group in (one, other))], 3)
