"""Colliding group ids, forced by few id bits, and the records of closed groups."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiocoll import GroupClosedError, GroupError, GroupOptions, ProcessGroup
from aiocoll.engine.control import closed_groups
from aiocoll.engine.control.closed_groups import ClosedGroups, Goodbyes
from aiocoll.engine.split_history import Split, Splits
from aiocoll.testing import run_ranks
from aiocoll.testing.virtual import run_virtual

from ..internals import Limits, comm_of, unmade_groups
from ..ranks import wait_until
from .jobs import memory_in_use

SHM = GroupOptions(transport="shm")
#: Number of concurrently open groups, number of splits before the memory measurement, and total number of splits.
BATCH, WARM, SPLITS = 20, 20_000, 1_000_000
#: Virtual seconds after which even the last goodbyes of closed groups have arrived.
CALM = 10.0


class Trial:
    """A job whose ranks split off groups, use some of them concurrently, and close them in any order.

    Args:
        seed: seed of all random choices.
        world_size: number of ranks.
        splits: number of splits that each rank makes.
        latency: shortest and longest latency of a frame in seconds; None for shared memory.

    Attributes:
        errors: error text of each rank for each split; None for a group that worked.
        records: numbers of closed groups, unmade groups, agreements and splits that each rank keeps at the end.
    """

    def __init__(self, seed: int, world_size: int, splits: int, latency: tuple[float, float] | None) -> None:
        self.seed = seed
        self.latency = latency
        chance = random.Random(seed)
        ranks = range(world_size)
        self.lists = [sorted(chance.sample(ranks, chance.randrange(1, world_size + 1))) for _ in range(splits)]
        self.errors: list[dict[int, str | None]] = [{} for _ in range(splits)]
        self.records: list[list[int]] = run_virtual(world_size, self._rank, seed=seed, latency=latency, timeout=None)

    async def _rank(self, pg: ProcessGroup) -> list[int]:
        chance = random.Random(self.seed * 100 + pg.rank())
        longest = 0.02 if self.latency is None else 20 * self.latency[1]
        users: set[asyncio.Task[None]] = set()
        for number, ranks in enumerate(self.lists):
            try:
                group = await pg.split_group(ranks)
            except GroupError as error:
                self.errors[number][pg.rank()] = str(error)
            else:
                if group is not None:
                    pause = chance.uniform(0, longest) if chance.random() < 0.5 else 0.0
                    user = asyncio.create_task(self._use(pg.rank(), group, number, pause))
                    users.add(user)
                    user.add_done_callback(users.discard)
            if chance.random() < 0.2:
                await asyncio.sleep(chance.uniform(0, longest / 4))
            while len(users) > 20:
                await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*users)
        await pg.barrier()
        await asyncio.sleep(CALM)
        endpoint = comm_of(pg).endpoint
        return [
            len(endpoint.registry.closed),
            len(unmade_groups(pg)),
            len(endpoint.agreements.voters),
            len(comm_of(pg).splits),
        ]

    async def _use(self, me: int, group: ProcessGroup, number: int, pause: float) -> None:
        """Exchange values that are unique to this group, and close the group after `pause` seconds."""
        try:
            for times in range(2):
                found = await group.allgather_object([number, times, me])
                assert found == [[number, times, rank] for rank in self.lists[number]]
        except GroupError as error:
            self.errors[number][me] = str(error)
        else:
            self.errors[number][me] = None
        await asyncio.sleep(pause)
        await group.shutdown()

    def check(self) -> int:
        """Check that all members of a group see the same outcome; return the number of collided groups."""
        collisions = 0
        for number, (ranks, errors) in enumerate(zip(self.lists, self.errors, strict=True)):
            details = f"seed {self.seed}, split {number} of {ranks}: {errors}"
            assert sorted(errors) == ranks, details
            if all(error is None for error in errors.values()):
                continue
            collisions += 1
            name = f"'world:0/{number}.{ranks[0]}'"
            assert all(f"group {name} cannot be made: its id 0x" in str(error) for error in errors.values()), details
        assert self.records == [[0, 0, 0, len(self.lists)]] * len(self.records), f"seed {self.seed}: {self.records}"
        return collisions


LATENCIES = [None, (0.0, 0.001), (0.001, 0.05)]


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_groups_with_colliding_ids_fail_on_all_their_ranks(
    world_size: int, latency: tuple[float, float] | None, limits: Limits
) -> None:
    limits(group_id_bits=8)
    collisions = sum(Trial(seed, world_size, 100, latency).check() for seed in range(4))
    assert 0 < collisions < 200


@pytest.mark.soak
def test_collisions_of_16_bit_group_ids_are_detected_on_all_ranks(limits: Limits) -> None:
    limits(group_id_bits=16)
    collisions = sum(Trial(seed, 4, 5_000, LATENCIES[seed % 3]).check() for seed in range(12))
    assert collisions > 5


async def _split(pg: ProcessGroup, count: int) -> None:
    """Split off `count` groups, use some of them, and close all groups."""
    everyone = list(range(pg.size()))
    for _ in range(0, count, BATCH):
        groups = [await pg.split_group(everyone) for _ in range(BATCH)]
        assert await groups[-1].allreduce(1.0) == pg.size()
        await asyncio.gather(*(group.shutdown() for group in groups))


@pytest.mark.soak
async def test_a_million_splits_do_not_increase_memory_use() -> None:
    """Split off a million groups. Each split takes 1.3 ms of CPU time, summed over both ranks."""

    async def rank(pg: ProcessGroup) -> tuple[int, int]:
        await _split(pg, WARM)
        await pg.barrier()
        before = memory_in_use()
        await _split(pg, SPLITS - WARM)
        await pg.barrier()
        after = memory_in_use()
        return after[0] - before[0], after[1] - before[1]

    for blocks, nbytes in await run_ranks(2, rank, timeout=None):
        assert blocks < 10_000
        assert nbytes < 8 << 20


@pytest.mark.parametrize("options", [None, SHM])
async def test_closed_groups_leave_no_record_on_any_rank(options: GroupOptions | None) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await _split(pg, 5 * BATCH)
        for _ in range(3):
            # Revoke the group. Either rank may then close the group first, so that both may send a goodbye at once.
            group = await pg.split_group([0, 1])
            if pg.rank() == 0:
                group.abort("a test")
            await group.wait_revoked()
            await group.shutdown()
        await pg.barrier()
        await wait_until(lambda: not len(comm_of(pg).endpoint.registry.closed))
        assert not unmade_groups(pg)
        for channel in comm_of(pg).channels:
            if channel.shared is not None:
                assert not channel.shared.common_reader._closed_groups
                assert not channel.shared.lane_reader._closed_groups
                assert not channel.shared.chunks.reader._closed_groups
        await pg.barrier()

    await run_ranks(2, rank, options=options)


async def test_agreements_of_closed_groups_leave_no_record() -> None:
    async def rank(pg: ProcessGroup) -> None:
        group = await pg.split_group([0, 1, 2])
        assert group is not None
        for _ in range(20):
            if pg.rank() == 0:
                group.abort("a test")
            await group.wait_revoked()
            group, old = await group.shrink(), group
            await old.shutdown()
        assert await group.allreduce(1) == 3
        await pg.barrier()
        await wait_until(lambda: not len(comm_of(pg).endpoint.registry.closed))
        assert not comm_of(pg).endpoint.agreements.voters
        await pg.barrier()

    await run_ranks(3, rank)


async def test_shrink_is_ended_by_the_close_of_its_group() -> None:
    async def rank(pg: ProcessGroup) -> None:
        group = await pg.split_group([0, 1])
        if pg.rank() == 0:
            group.abort("a test")
            shrinking = asyncio.create_task(group.shrink())
            await asyncio.sleep(0)
            await group.shutdown()
            with pytest.raises(GroupClosedError, match="closed the group while shrink"):
                await shrinking
        await pg.barrier()

    await run_ranks(2, rank)


def test_number_of_closed_group_records_for_unreachable_peers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_groups, "RECORDS", 3)
    monkeypatch.setattr(closed_groups, "RECENT", 2)
    dropped: list[int] = []
    closed = ClosedGroups(lambda identity, ranks: dropped.append(identity))
    for identity in range(6):
        closed.close(identity, Goodbyes(str(identity), (0, 1)), [1])
    assert (len(closed), dropped) == (3, [0, 1, 2])
    assert [closed.is_known(identity) for identity in range(6)] == [False, True, True, True, True, True]
    assert [closed.name(identity) for identity in range(6)] == [None, None, None, "3", "4", "5"]
    assert closed.sends_notes(1, 1, direct=False), "a recently closed group no longer recognizes its late messages"
    assert not closed.sends_notes(1, 1, direct=False, name="a later group with this id")
    assert not closed.sends_frames(1, 1)


def test_closed_group_record_is_kept_until_both_goodbyes_of_each_rank() -> None:
    dropped: list[int] = []
    closed = ClosedGroups(lambda identity, ranks: dropped.append(identity))
    goodbyes = Goodbyes("a", (0, 1, 2, 3))
    goodbyes.mark(1, frames=True, notes=False)
    closed.close(7, goodbyes, [1, 2, 3])
    assert [closed.sends_frames(7, rank) for rank in range(4)] == [False, False, True, True]
    assert [closed.sends_notes(7, rank, direct=False) for rank in range(4)] == [False, True, True, True]
    assert not closed.mark(7, 2, "b", frames=True, notes=True), "the name belongs to another group"
    assert closed.mark(7, 2, "a", frames=True, notes=True)
    assert not closed.sends_frames(7, 2)
    closed.end([3])
    assert (len(closed), dropped) == (1, [])
    assert closed.mark(7, 1, None, frames=False, notes=True)
    assert (len(closed), dropped) == (0, [7])


def test_only_the_latest_splits_are_recorded() -> None:
    splits, kept = Splits(), 4096
    for number in range(kept + 3):
        splits.append(None)
        if number % 2:
            splits[number] = Split(1, number, None, (0, 1))
    assert (len(splits), splits.known()) == (kept + 3, kept // 2 + 3)
    assert (splits[0], splits[1], splits[2], splits[kept + 3]) == (None, None, None, None)
    assert splits[kept + 1] == Split(1, kept + 1, None, (0, 1))
    splits[1] = Split(1, 1, None, (0, 1))
    assert splits[1] is None
