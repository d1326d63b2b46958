"""`split`, which divides a group by colours and orders the new groups by keys."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupClosedError, GroupError, PeerLostError, ProcessGroup
from aiocoll.group.parts import parts_of

from ..ranks import LINKS, check_group, parametrize_transports, wait_until


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_split_groups_by_colour_and_orders_by_key(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    everyone = range(size)
    # Cases: the colour, the key, and the expected ranks of this rank's new group.
    cases: list[tuple[Any, int, list[int]]] = [
        (0, 0, list(everyone)),
        (0, -rank, list(reversed(everyone))),
        (rank % 2 == 0, 0, [other for other in everyone if other % 2 == rank % 2]),
        (rank % 3, -rank, [other for other in reversed(everyone) if other % 3 == rank % 3]),
        (f"color {rank // 2}", rank % 2 * -7, sorted({other for other in everyone if other // 2 == rank // 2})[::-1]),
        (rank, 5, [rank]),
        (np.int64(3), np.int64(rank * 5 % 7), sorted(everyone, key=lambda other: other * 5 % 7)),
    ]
    groups = []
    for color, key, expected in cases:
        group = await pg.split(color, key)
        assert group is not None
        assert group.global_ranks == tuple(expected)
        assert group.rank() == expected.index(rank)
        assert group.size() == len(expected)
        groups.append(group)
    # Use all groups concurrently: no group waits for another one.
    found = await asyncio.gather(check_group(pg), *(check_group(group) for group in groups))
    assert found[1:] == [tuple(expected) for _, _, expected in cases]
    names = [group.group_name for group in groups]
    assert len(set(names)) == len(names)


@pytest.mark.ranks(1, 2, 5)
async def test_rank_without_a_colour_receives_no_group_from_split(pg: ProcessGroup) -> None:
    group = await pg.split(None if pg.rank() == 0 else 1)
    assert (group is None) == (pg.rank() == 0)
    if group is not None:
        assert await check_group(group) == tuple(range(1, pg.size()))
    assert await pg.split(None, 3) is None
    # The number 1 and the string "1" are different colours.
    by_type = await pg.split("1" if pg.rank() % 2 else 1)
    assert by_type is not None
    assert by_type.global_ranks == tuple(rank for rank in range(pg.size()) if rank % 2 == pg.rank() % 2)


@pytest.mark.ranks(4)
@parametrize_transports("memory", "unix")
async def test_split_works_concurrently_with_other_calls(pg: ProcessGroup) -> None:
    """Let splits end in different orders on different ranks; each keeps the sequence number of its call."""
    rank = pg.rank()
    splits = [asyncio.ensure_future(pg.split(rank % 2, key)) for key in (0, -rank)]
    await asyncio.sleep(0)  # lets the splits begin
    total = pg.allreduce(np.ones(100_000))
    pair = await pg.split_group([[0, 3], [1, 2]])
    assert pair is not None
    third = asyncio.ensure_future(pg.split("all"))
    assert (await total == 4).all()
    one, two = [await split for split in splits]
    three = await third
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.global_ranks == (rank % 2, rank % 2 + 2)
    assert two.global_ranks == (rank % 2 + 2, rank % 2)
    assert await asyncio.gather(
        check_group(one), check_group(three), check_group(two), check_group(pair), check_group(pg)
    )


@pytest.mark.ranks(3)
async def test_shrink_of_a_reordered_group_keeps_its_rank_order(pg: ProcessGroup) -> None:
    group = await pg.split(0, -pg.rank())
    assert group is not None
    if pg.rank() == 1:
        with pytest.raises(GroupError):
            await group.barrier()
        return
    smaller = await group.shrink(exclude=[1])
    assert smaller.global_ranks == (2, 0)
    assert await check_group(smaller) == (2, 0)


@pytest.mark.ranks(2)
async def test_split_group_can_be_split_again(pg: ProcessGroup) -> None:
    group = await pg.split(0, -pg.rank())
    assert group is not None
    part = await group.split(group.rank() == 0)
    assert part is not None
    assert part.global_ranks == (pg.rank(),)
    again = await group.split_group([0, 1])
    assert again is not None
    assert again.global_ranks == (1, 0)  # the ranks have the order of the parent group
    assert await check_group(again) == (1, 0)


@pytest.mark.ranks(2)
async def test_split_group_of_other_ranks_works_after_one_rank_cancels_the_split(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        splitting = asyncio.ensure_future(pg.split(0))
        await asyncio.sleep(0)
        splitting.cancel()
        await asyncio.wait([splitting])
        assert parts_of(pg).reconfigurer.open_groups() == [pg]
        await wait_until(lambda: len(parts_of(pg).reconfigurer.open_groups()) == 2)
        group = parts_of(pg).reconfigurer.open_groups()[1]
    else:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        group = await pg.split(0)
    assert await check_group(group) == (0, 1)


@pytest.mark.ranks(2)
async def test_split_with_wrong_arguments_creates_no_group(pg: ProcessGroup) -> None:
    for color, key, message in (
        (1.5, 0, "color must be an int, a str or None, not float"),
        ([1], 0, "color must be an int, a str or None, not list"),
        (1, "a", "key must be an int, not str"),
        (1, None, "key must be an int, not NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            await pg.split(color, key)  # type: ignore[arg-type]
    assert pg.pending() == []
    await pg.barrier()
    other = pg.split(0) if pg.rank() == 0 else pg.allreduce(np.ones(1))
    with pytest.raises(CollectiveMismatchError, match="ALLGATHER_OBJECT"):
        await other


@pytest.mark.ranks(2)
async def test_closed_group_cannot_split(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        splitting = asyncio.ensure_future(pg.split(0))
        await asyncio.sleep(0)
        await pg.shutdown()
        with pytest.raises((GroupClosedError, PeerLostError)):
            await splitting
        with pytest.raises(GroupClosedError):
            await pg.split(0)
    else:
        await pg.split(0)


@pytest.mark.ranks(2)
async def test_split_in_a_block_starts_the_recorded_calls(pg: ProcessGroup) -> None:
    x = np.ones(3)
    async with pg.coalescing():
        work = pg.allreduce(x)
        group = await pg.split(0, -pg.rank())
        assert work.done()
    assert group is not None
    assert (x == 2).all()
    assert await check_group(group) == (1, 0)


@pytest.mark.ranks(4)
async def test_local_split_can_be_called_only_by_the_ranks_of_the_new_group(pg: ProcessGroup) -> None:
    for _ in range(2):
        if pg.rank() in (1, 3):
            part = await pg.split_group([3, 1], local=True)
            assert part.global_ranks == (1, 3)
            assert await part.allgather_object(pg.rank()) == [1, 3]
    # Ranks 0 and 2 did not count the local splits of ranks 1 and 3, so the next split must still match.
    whole = await pg.split_group(range(4))
    assert await whole.allreduce(1) == 4
    assert await pg.split_group([(pg.rank() + 1) % 4], local=True) is None


@pytest.mark.ranks(3)
@pytest.mark.parametrize("local", [False, True])
async def test_split_group_numbers_its_ranks_in_the_given_order(pg: ProcessGroup, local: bool) -> None:
    if pg.rank() != 1 or not local:
        part = await pg.split_group([2, 0], order="given", local=local)
        if pg.rank() == 1:
            assert part is None
        else:
            assert part.rank() == {2: 0, 0: 1}[pg.rank()]
            assert await part.allgather_object(pg.rank()) == [2, 0]
    with pytest.raises(ValueError, match="order='given by me' must be 'group' or 'given'"):
        pg.split_group([0], order="given by me")


@pytest.mark.ranks(2)
async def test_split_group_with_different_rank_orders_is_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    part = await pg.split_group([pg.rank(), 1 - pg.rank()], order="given")
    with pytest.raises(CollectiveMismatchError, match="ranks"):
        await part.barrier()
