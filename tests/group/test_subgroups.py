"""Subgroups from `split_group`, over every transport."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    GroupRevokedError,
    HashStore,
    PeerLostError,
    ProcessGroup,
    new_group,
)
from aiocoll.engine.split_history import Splits

from ..internals import Limits, channels_of, comm_of, links_of
from ..ranks import LINKS, check_group, options, parametrize_transports, run_ranks, wait_until


async def own_subgroup(pg: ProcessGroup, ranks: Any, **given: Any) -> ProcessGroup:
    """Split the group; return this rank's subgroup, and fail if it has none."""
    group: ProcessGroup | None = await pg.split_group(ranks, **given)
    assert group is not None
    return group


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_subgroups_of_even_and_odd_ranks_work(pg: ProcessGroup) -> None:
    halves = [half for half in (range(0, pg.size(), 2), range(1, pg.size(), 2)) if half]
    async with await own_subgroup(pg, halves) as half, await own_subgroup(pg, [range(pg.size())]) as whole:
        mine = tuple(halves[pg.rank() % 2])
        assert (half.rank(), half.size()) == (pg.rank() // 2, len(mine))
        assert whole.rank() == pg.rank()
        # Use both groups concurrently: each has separate sequence numbers, and neither waits for the other.
        assert await asyncio.gather(check_group(half), check_group(pg), check_group(whole)) == [
            mine,
            whole.global_ranks,
            pg.global_ranks,
        ]
    for group in (half, whole):
        with pytest.raises(GroupClosedError):
            group.barrier()
    assert await check_group(pg) == tuple(range(pg.size()))


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
async def test_subgroups_can_be_split(pg: ProcessGroup) -> None:
    found = []
    group: ProcessGroup | None = pg
    while group is not None:
        found.append(await check_group(group))
        last = group.size() - 1
        group = await group.split_group(range(1, last + 1)) if last else None
    assert found == [(0, 1, 2, 3), (1, 2, 3), (2, 3), (3,)][: pg.rank() + 1]


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
async def test_messages_in_a_subgroup_use_its_rank_numbers(pg: ProcessGroup) -> None:
    group = await pg.split_group([3, 1])
    if pg.rank() % 2:
        assert group is not None
        peer = 1 - group.rank()
        # Send messages with the same tag in both groups at the same time.
        sends = [
            group.send_object("in the part", peer, tag=5),
            pg.send_object("in the whole", 4 - pg.rank(), tag=5),
        ]
        x = np.zeros(3)
        assert await pg.recv_object(4 - pg.rank(), tag=5) == "in the whole"
        assert await group.recv_object(peer, tag=5) == "in the part"
        big = group.send(np.full(300_000, float(pg.rank())), peer)
        y = np.zeros(300_000)
        work = group.recv_anysource(y)
        await work
        assert work.source_rank() == peer
        assert (y == 4 - pg.rank()).all()
        await asyncio.gather(*(work.join() for work in sends), big.join())
        await group.broadcast(x, 1)
    await pg.barrier()


@pytest.mark.ranks(3)
async def test_subgroup_returns_its_name_ranks_and_size(pg: ProcessGroup) -> None:
    work = pg.split_group([2, 0], timeout=30, group_name="ends")
    assert (work.done(), work.op, work.group) == (True, "SPLIT_GROUP", pg)
    ends = await work
    middle = await pg.split_group([1])
    plain = await own_subgroup(pg, [[1, 2], [0]])
    assert (plain.timeout, plain.global_ranks) == (pg.timeout, (0,) if pg.rank() == 0 else (1, 2))
    assert plain.group_name == ("world:0/2.0" if pg.rank() == 0 else "world:0/2.1")
    if pg.rank() == 1:
        assert ends is None
        assert middle is not None
        assert (middle.rank(), middle.size(), middle.global_ranks) == (0, 1, (1,))
        assert middle.group_name == "world:0/1.1"
        return
    assert middle is None
    assert ends is not None
    assert (ends.group_name, ends.timeout, ends.global_ranks) == ("ends", 30.0, (0, 2))
    assert (ends.rank(), ends.group_desc) == (pg.rank() // 2, "2 ranks")
    again = await own_subgroup(ends, np.array([1, 0]), timeout=3)
    assert (again.timeout, again.global_ranks, again.group_name) == (3.0, (0, 2), "ends/0.0")


@pytest.mark.ranks(2)
async def test_split_group_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "ranks must be a list of ranks, or a list of such lists, not int"),
        ("01", TypeError, "ranks must be a list of ranks, or a list of such lists, not str"),
        (None, TypeError, "ranks must be a list of ranks, or a list of such lists, not NoneType"),
        ([], ValueError, "ranks is empty: it must name at least one rank"),
        ([[0], []], ValueError, "ranks[1] is empty: it must name at least one rank"),
        ([0, 0], ValueError, "ranks names rank 0 more than once"),
        ([[0], [1, 1]], ValueError, "ranks[1] names rank 1 more than once"),
        ([[0, 1], [1]], ValueError, "ranks[0] and ranks[1] both name rank 1: lists of one call must not share ranks"),
        ([0, 2], ValueError, "ranks[1]=2 is not a rank of group 'world:0': ranks are 0 to 1"),
        ([[0], [-1]], ValueError, "ranks[1][0]=-1 is not a rank of group 'world:0'"),
        ([0.0], TypeError, "ranks[0] must be a rank (int), not float"),
        ([0, [1]], TypeError, "ranks[1] must be a rank (int), not list"),
        ([True], TypeError, "ranks[0] must be a rank (int), not bool"),
    ]
    for ranks, kind, words in wrong:
        with pytest.raises(kind, match=re.escape(words)):
            pg.split_group(ranks)
    with pytest.raises(TypeError, match="group_name must be a str or None, not int"):
        pg.split_group([0], group_name=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        pg.split_group([0, 1], timeout=-1)
    with pytest.raises(ValueError, match="group_name='world:0' is the name of an open group"):
        pg.split_group([0, 1], group_name="world:0")
    async with await own_subgroup(pg, [0, 1], group_name="a") as group:
        with pytest.raises(ValueError, match="group_name='a' is the name of an open group"):
            group.split_group([0, 1], group_name="a")
        assert await check_group(group) == (0, 1)  # the refused calls have not taken a number
    async with await own_subgroup(pg, [0, 1], group_name="a") as again:
        assert await check_group(again) == (0, 1)


# -- ranks that pass different arguments to `split_group`


async def check_split_mismatch(pg: ProcessGroup, group: ProcessGroup | None, words: str) -> None:
    """Check that the first collective of the new group raises a mismatch error that shows all ranks' split calls."""
    if group is not None:
        with pytest.raises(CollectiveMismatchError, match=re.escape(words)) as raised:
            await group.allreduce(np.ones(3))
        assert raised.value.op == "SPLIT_GROUP"
        with pytest.raises(GroupRevokedError):
            group.barrier()
    assert await check_group(pg) == pg.global_ranks


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_different_rank_lists_of_split_group_are_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    group = await pg.split_group([0, 1] if pg.rank() == 0 else [0, 1, 2])
    words = "following: ranks. Group 'world:0': rank 0 called SPLIT_GROUP(ranks=[0, 1], SequenceNumber=1); rank "
    await check_split_mismatch(pg, group, words)


@pytest.mark.ranks(3)
async def test_rank_that_is_not_in_its_own_rank_list_receives_no_group(pg: ProcessGroup) -> None:
    group = await pg.split_group([0, 1] if pg.rank() == 0 else [2])
    words = "SPLIT_GROUP(ranks=[0, 1], SequenceNumber=1); rank 1 called SPLIT_GROUP(ranks=[], SequenceNumber=1)"
    if pg.rank() == 2:
        assert group is not None
        assert await check_group(group) == (2,)
        assert await check_group(pg) == (0, 1, 2)
    else:
        await check_split_mismatch(pg, group, words)


@pytest.mark.ranks(2)
async def test_different_subgroup_names_are_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    words = (
        "Collectives differ in the following: group_name. Group 'world:0': rank 0 called SPLIT_GROUP(ranks=[0, 1], "
        "SequenceNumber=1); rank 1 called SPLIT_GROUP(ranks=[0, 1], group_name='b', SequenceNumber=1)"
    )
    await check_split_mismatch(pg, await pg.split_group([0, 1], group_name="b" if pg.rank() else None), words)


@pytest.mark.ranks(3)
async def test_subgroups_split_from_mismatched_parent_groups_are_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    outer = await own_subgroup(pg, [[0, 1], [2]] if pg.rank() == 0 else [0, 1, 2])
    words = "differ in the following: ranks. Group 'world:0': rank 0 called SPLIT_GROUP(ranks=[0, 1], SequenceNumber=1)"
    inner = await outer.split_group([0, 1])
    if pg.rank() == 2:
        await check_split_mismatch(pg, outer, words)
    else:
        await check_split_mismatch(pg, inner, words)


@pytest.mark.parametrize("lacks_colours", [False, True])
async def test_call_of_a_subgroup_waits_for_a_rank_that_has_not_split_yet(lacks_colours: bool) -> None:
    """Let a rank call `split_group` late, or only after it has received the colours of an earlier `split`."""
    called = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            group = await own_subgroup(pg, [0, 1])
            work = group.barrier()
            operation, missing = comm_of(group).in_flight._operations[1], comm_of(group).stalls.missing
            await wait_until(lambda: "rank 1 (which has split group 'world:0' only 0 times" in missing(operation)[1])
            called.set()
            await work
        else:
            if lacks_colours:
                comm_of(pg).splits.append(None)
            await called.wait()
            if lacks_colours:
                comm_of(pg).splits = Splits()
            await (await own_subgroup(pg, [0, 1])).barrier()

    await run_ranks(2, rank)


@pytest.mark.ranks(2)
async def test_timeout_error_of_a_subgroup_call_names_a_rank_that_never_split(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        group = await own_subgroup(pg, [0, 1])
        with pytest.raises(CollectiveTimeoutError, match="'world:0' only 0 times") as raised:
            await group.barrier(timeout=0.4)
        assert raised.value.ranks == (1,)
    await pg.barrier()


async def test_subgroup_reports_a_rank_whose_parent_group_failed_before_the_split() -> None:
    reported = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            group = await own_subgroup(pg, [0, 1])
            await pg.send_object("split", 1)
            with pytest.raises(GroupError, match="aborted by rank 1: too bad"):
                await group.barrier()
            reported.set()
        else:
            await pg.recv_object(0)
            pg.abort("too bad")
            with pytest.raises(GroupRevokedError):
                pg.split_group([0, 1])
            await reported.wait()

    await run_ranks(2, rank)


@pytest.mark.parametrize("ends", [False, True])
async def test_subgroup_reports_a_rank_that_left_before_the_split(ends: bool) -> None:
    store = HashStore()

    async def rank(number: int) -> None:
        async with (
            new_group(store=store, rank=number, world_size=2) as pg,
            new_group(store=store, rank=number, world_size=2) as other,
        ):
            if number == 0:
                group = await own_subgroup(pg, [0, 1])
                await other.barrier()
                with pytest.raises(PeerLostError) as raised:
                    await group.barrier()
                assert raised.value.how == "left"
                assert await check_group(await own_subgroup(pg, [0])) == (0,)
            else:
                await other.barrier()
                await pg.shutdown()
            if not ends:
                await other.barrier()

    await asyncio.gather(rank(0), rank(1))


# -- failing and closing


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
async def test_failure_of_a_subgroup_does_not_affect_other_groups(pg: ProcessGroup) -> None:
    pair, trio = await pg.split_group([0, 1]), await pg.split_group([1, 2, 3])
    if pair is not None:
        with pytest.raises(CollectiveMismatchError, match="SequenceNumber=1"):
            await pair.allreduce(np.ones(3 + pg.rank()))
    if trio is not None:
        assert await check_group(trio) == (1, 2, 3)
    assert await check_group(pg) == (0, 1, 2, 3)
    with suppress(GroupError):  # the abort message may overtake a frame of the barrier
        await pg.barrier()
    pg.abort("the whole fails")
    await pg.wait_revoked()
    if trio is not None:
        assert await check_group(trio) == (1, 2, 3)


@pytest.mark.parametrize("transport", LINKS)
async def test_loss_of_a_rank_fails_all_groups_of_the_rank(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> Any:
        pairs, inner = (
            await own_subgroup(pg, [[0, 1], [2, 3]]),
            await own_subgroup(pg, [1, 3]) if pg.rank() % 2 else None,
        )
        if pg.rank() == 3:
            nested = await own_subgroup(pairs, [0, 1])
            await nested.barrier()
            raise ValueError("rank 3 fails")
        if pg.rank() == 2:
            nested = await own_subgroup(pairs, [0, 1])
            await nested.barrier()
            for group in (nested, pairs):
                with pytest.raises(GroupError, match="ValueError: rank 3 fails"):
                    await group.barrier()
        else:
            assert await check_group(pairs) == (0, 1)
        if inner is not None:
            with pytest.raises(GroupError, match="ValueError: rank 3 fails"):
                await inner.barrier()
        with pytest.raises(GroupError):
            await pg.barrier()
        if pg.rank() < 2:
            assert await check_group(pairs) == (0, 1)

    with pytest.raises(ValueError, match="rank 3 fails"):
        await run_ranks(4, rank, transport=transport)


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_closing_a_parent_group_closes_its_subgroups(pg: ProcessGroup) -> None:
    group = await own_subgroup(pg, range(3))
    inner = await own_subgroup(group, [[0], [1, 2]])
    late = inner.allreduce(np.ones(100_000))
    endpoint = comm_of(pg).endpoint
    await pg.shutdown()
    assert late.is_success()
    for each in (pg, group, inner):
        with pytest.raises(GroupClosedError):
            each.barrier()
    with pytest.raises(GroupClosedError):
        pg.split_group([0])
    await group.shutdown()
    assert endpoint.context.closed
    assert endpoint.groups == {}


@pytest.mark.ranks(2)
async def test_group_that_is_closing_cannot_be_split(pg: ProcessGroup) -> None:
    work = pg.barrier() if pg.rank() else None
    ending = asyncio.ensure_future(pg.shutdown())
    await asyncio.sleep(0)
    if work is not None:
        with pytest.raises(GroupClosedError, match="is being closed"):
            pg.split_group([0, 1])
    await ending
    assert work is None or isinstance(work.exception(), PeerLostError)


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
async def test_subgroups_can_shrink_and_be_split(pg: ProcessGroup) -> None:
    trio = await pg.split_group([1, 2, 3])
    if trio is not None and trio.rank():
        small = await trio.shrink(exclude=[0])
        assert small.group_name == "world:0/0.1~1"
        assert await check_group(small) == (2, 3)
        inner = await own_subgroup(small, [1, 0])
        assert await check_group(inner) == (2, 3)
        await pg.send_object("shrunk", 1)
    elif trio is not None:
        await trio.wait_revoked()
        for peer in (2, 3):
            await pg.recv_object(peer)
    assert await check_group(pg) == (0, 1, 2, 3)


async def run_newcomer(where: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    async with new_group(join=True, **where) as pg:
        return pg.group_name, await check_group(pg)


@pytest.mark.parametrize("transport", LINKS)
async def test_subgroups_can_grow(transport: str) -> None:
    """Grow a subgroup that does not contain rank 0 of the parent group; another subgroup stays unchanged."""
    where: dict[str, Any] = {"store": HashStore(), "options": options(transport)}

    async def rank(number: int) -> Any:
        async with new_group(rank=number, world_size=4, **where) as pg:
            group = await own_subgroup(pg, [[0], [1, 2, 3]])
            if number:
                async with await group.grow(2) as grown:
                    assert (grown.rank(), grown.size()) == (number - 1, 5)
                    found = grown.group_name, await check_group(grown)
            else:
                found = group.group_name, await check_group(group)
            assert await check_group(group) == ((1, 2, 3) if number else (0,))
            assert await check_group(pg) == (0, 1, 2, 3)
            return found

    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(rank, range(4)), run_newcomer(where), run_newcomer(where))
    assert results == [("world:0/0.0", (0,))] + [("world:0/0.1~1", (0, 1, 2, 3, 4))] * 5


@pytest.mark.parametrize("transport", LINKS)
async def test_subgroups_can_grow_concurrently_and_outlive_the_parent_group(transport: str) -> None:
    where: dict[str, Any] = {"store": HashStore(), "options": options(transport)}

    async def rank(number: int) -> Any:
        async with new_group(rank=number, world_size=4, **where) as pg:
            group = await own_subgroup(pg, [[0, 2], [1, 3]])
            if number == 3:
                group.abort("rank 3 goes")
                return None
            if number == 1:
                await group.wait_revoked()
                group = await group.shrink(exclude=[1])
            grown = await group.grow(1)
            await pg.shutdown()
        async with grown:
            return grown.group_name, await check_group(grown)

    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(rank, range(4)), run_newcomer(where), run_newcomer(where))
    evens, odds = ("world:0/0.0~1", (0, 1, 2)), ("world:0/0.1~2", (0, 1))
    assert results[:4] == [evens, odds, evens, None]
    assert sorted(results[4:]) == [evens, odds]


# -- shared links and threads


@pytest.mark.ranks(4)
@parametrize_transports("memory", "unix")
async def test_subgroups_share_links_and_threads(pg: ProcessGroup) -> None:
    size = pg.size()
    await pg.alltoall_object([None] * size)  # opens all links
    await pg.barrier()
    files = len(os.listdir("/proc/self/fd"))
    links = [id(link) for link in links_of(pg)]
    groups = [await own_subgroup(pg, range(size)) for _ in range(20)]
    await pg.barrier()
    for group in groups:
        await group.alltoall_object([None] * size)
    assert [id(link) for link in links_of(pg)] == links
    assert len(os.listdir("/proc/self/fd")) == files
    await pg.barrier()


@pytest.mark.ranks(7)
async def test_split_group_sends_no_messages(pg: ProcessGroup) -> None:
    await pg.barrier()
    frames: list[object] = []
    for link in links_of(pg):
        link.write = lambda *frame: frames.append(frame)  # type: ignore[method-assign, return-value, misc]
    before = len(channels_of(pg))
    for _ in range(10):
        pg.split_group(range(7))
    assert frames == []
    assert len(channels_of(pg)) == before
    for link in links_of(pg):
        del link.write
    await pg.barrier()


async def test_split_group_whose_group_id_is_in_use_is_refused(limits: Limits) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        limits(group_id_bits=0)  # from now on, all groups have the same id
        group = await own_subgroup(pg, [0, 1])
        for number in (1, 2):
            text = f"'world:0/{number}.0' cannot be made: its id 0x0 is that of group 'world:0/0.0', which is open"
            with pytest.raises(GroupError, match=text):
                await pg.split_group([0, 1])
            await pg.barrier()
        await group.shutdown()
        await wait_until(lambda: not len(comm_of(pg).endpoint.registry.closed))
        await pg.barrier()
        assert await check_group(await own_subgroup(pg, [0, 1])) == (0, 1)

    await run_ranks(2, rank)
