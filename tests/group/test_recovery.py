"""Recovery of groups by `shrink` and `grow` over every transport; for the agreement, see `engine/test_shrink.py`."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
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
    ProcessGroup,
    RendezvousError,
    StoreUnavailableError,
    TCPStore,
    current_process_group,
    new_group,
)
from aiocoll.engine.consensus.completed import Completed, combine
from aiocoll.transport.frame import HEADER, FrameKind

from ..internals import comm_of, pending_waits, unmade_groups
from ..ranks import LINKS, check_group, options, parametrize_transports, run_ranks, wait_until


async def wait_for_all_ranks(pg: ProcessGroup) -> None:
    """Wait for all ranks; ignore the error if a fast rank revokes the group before this rank has finished."""
    with suppress(GroupError):
        await pg.barrier()


@pytest.mark.parametrize("transport", LINKS)
async def test_frames_of_an_older_group_do_not_reach_a_newer_group_with_the_same_name(transport: str) -> None:
    store = HashStore()

    async def rank(number: int) -> None:
        where = {"store": store, "rank": number, "world_size": 2, "options": options(transport)}
        async with new_group(**where) as pg:  # type: ignore[arg-type]
            older = []
            for _ in range(3):
                again = await new_group(name="again", **where)  # type: ignore[arg-type]
                await again.barrier()
                x = np.full(3, 1.0 - number)
                await again.broadcast(x, 0)
                assert (x == 1).all()
                last = comm_of(again).journal.last()
                assert last is not None
                older.append(
                    HEADER.pack(
                        FrameKind.DATA, 0, 0, comm_of(again).id, last.op, last.signature.fingerprint(), 0, 24, 24
                    )
                )
                if number == 1:
                    await again.shutdown()
                await pg.barrier()
                if number == 0:
                    link = comm_of(again).channels[1].link
                    assert link is not None
                    for _ in range(3):
                        link.write(older[-1], memoryview(np.full(3, 7.0)).cast("B"))
                    await again.shutdown()
            assert len(set(older)) == 3
            await pg.barrier()
            assert not unmade_groups(pg)

    await gather_results(rank(0), rank(1))


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_shrink_of_an_aborted_group_keeps_all_ranks(pg: ProcessGroup) -> None:
    await wait_for_all_ranks(pg)
    pg.abort(f"by rank {pg.rank()}")
    cause = await pg.wait_revoked()
    async with await pg.shrink() as small:
        assert await check_group(small) == (0, 1, 2)
        assert (small.rank(), small.size(), small.group_name) == (pg.rank(), 3, "world:0~1")
        assert small.timeout == pg.timeout
        with pytest.raises(GroupRevokedError) as raised:
            pg.barrier()
        assert raised.value.__cause__ is cause


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
async def test_shrink_of_a_healthy_group_removes_the_excluded_ranks(pg: ProcessGroup) -> None:
    await pg.allreduce(1)
    if pg.rank() == 1:
        with pytest.raises(GroupError, match=r"continued as a new group|given up"):
            await pg.recv_object(0)
        with pytest.raises(GroupError, match="rank 1 was excluded: ranks 0, 2, 3 continued without it"):
            await pg.shrink()
        return
    small = await pg.shrink(exclude=[1])
    assert await check_group(small) == (0, 2, 3)
    await pg.shutdown()
    async with await small.shrink(exclude={0}) if small.rank() else small as smaller:
        if small.rank():
            assert smaller.group_name == "world:0~2"
            assert await check_group(smaller) == (2, 3)
    await small.shutdown()


@pytest.mark.ranks(2)
async def test_shrink_after_a_mismatch_keeps_all_ranks(pg: ProcessGroup) -> None:
    with pytest.raises(CollectiveMismatchError):
        await pg.allreduce(np.ones(3 + pg.rank()))
    async with await pg.shrink() as small:
        assert await check_group(small) == (0, 1)


@pytest.mark.ranks(3)
@parametrize_transports("unix")
async def test_shrink_after_a_timeout_keeps_all_ranks(pg: ProcessGroup) -> None:
    if pg.rank():
        with pytest.raises(CollectiveTimeoutError):
            await pg.barrier(timeout=0.3)
    else:
        assert isinstance(await pg.wait_revoked(), CollectiveTimeoutError)
    async with await pg.shrink() as small:
        assert await check_group(small) == (0, 1, 2)


@pytest.mark.ranks(3)
async def test_shrunk_group_reports_completed_calls(pg: ProcessGroup) -> None:
    await pg.barrier()
    await pg.allreduce(1, key="a")
    await pg.allreduce(1, key="b")
    await pg.allreduce(1, key="a")
    # Rank 1 makes no broadcast, so that the broadcasts complete on ranks 0 and 2 only.
    if pg.rank() != 1:
        await pg.broadcast(np.ones(3), 0)
        await pg.broadcast(np.ones(3), 0, key="b")
    pending = [pg.barrier() for _ in range(2)] if pg.rank() == 0 else []
    for _ in range(pg.size() - 1):  # wait until every rank has made its calls
        await pg.send_object("here", (pg.rank() + 1) % 3)
        await pg.recv_object((pg.rank() - 1) % 3)
    pg.abort("now")
    small = await pg.shrink()
    assert all(isinstance(work.exception(), GroupError) for work in pending)
    everywhere, somewhere = small.completed_everywhere, small.completed_somewhere
    assert everywhere is not None
    assert somewhere is not None
    assert everywhere == Completed(1, frozenset(), frozenset({("a", 1), ("a", 2), ("b", 1)}))
    assert somewhere == Completed(4, frozenset({3, 4}), everywhere.keyed | {("b", 2)})
    assert (everywhere.through, somewhere.through) == (1, 2)
    assert 1 in everywhere
    assert 2 not in everywhere
    assert 2 in somewhere
    assert 3 not in somewhere
    assert ("b", 2) in somewhere
    assert ("b", 2) not in everywhere
    assert pg.completed_everywhere is None
    await small.shutdown()


def test_completion_reports_of_all_ranks_are_merged() -> None:
    reports = [
        {"upto": 9, "missing": [4, 8], "keyed": [["x", 1], ["y", 2]]},
        {"upto": 6, "missing": [], "keyed": [["x", 1]]},
        {"upto": 9, "missing": [3, 8, 9], "keyed": [["x", 1], ["y", 1]]},
    ]
    everywhere, somewhere = combine(reports)
    each = [Completed.of(report) for report in reports]
    for op in range(12):
        assert (op in everywhere) is all(op in one for one in each)
        assert (op in somewhere) is any(op in one for one in each)
    assert everywhere.keyed == {("x", 1)}
    assert somewhere.keyed == {("x", 1), ("y", 1), ("y", 2)}
    assert Completed.of(somewhere.as_data()) == somewhere


def test_completion_report_fits_in_a_control_frame() -> None:
    crowd = Completed(100_000, frozenset(range(1, 100_000, 2)), frozenset((f"{key:0100}", 1) for key in range(5000)))
    report = crowd.as_data()
    assert len(report["missing"]) == 10_000
    assert report["upto"] == 20_000
    assert report["keyed"] == [(f"{key:0100}", 1) for key in range(303)]


@pytest.mark.ranks(2)
async def test_shrink_refuses_wrong_arguments(pg: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"exclude=2 is not a rank of group 'world:0'"):
        await pg.shrink(exclude=[2])
    with pytest.raises(TypeError, match="exclude must be a rank"):
        await pg.shrink(exclude=["0"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=f"exclude names this rank, {pg.rank()}"):
        await pg.shrink(exclude=[pg.rank()])
    await pg.barrier()  # the refused calls had no effect
    work = asyncio.ensure_future(pg.shrink())
    await asyncio.sleep(0)
    if pg.rank():
        with pytest.raises(RuntimeError, match="already in progress"):
            await pg.shrink()
    small = await work
    with pytest.raises(GroupError, match=r"'world:0', rank [0-9]+: shrink\(\) was already called"):
        await pg.shrink()
    await pg.shutdown()
    with pytest.raises(GroupClosedError):
        await pg.shrink()
    await check_group(small)
    await small.shutdown()


@pytest.mark.ranks(1)
async def test_group_of_one_rank_can_shrink(pg: ProcessGroup) -> None:
    pg.abort("alone")
    async with await pg.shrink() as small:
        assert await check_group(small) == (0,)


# -- growing


async def gather_results(*ranks: Awaitable[Any]) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*ranks)


async def run_member(where: dict[str, Any], rank: int, world_size: int, then: Callable[[ProcessGroup], Any]) -> Any:
    async with new_group(rank=rank, world_size=world_size, **where) as pg:
        return await then(pg)


async def run_newcomer(where: dict[str, Any]) -> Any:
    async with new_group(join=True, **where) as pg:
        return pg.rank(), pg.group_name, await check_group(pg)


async def grow_by_two(pg: ProcessGroup) -> Any:
    async with await pg.grow(2) as grown:
        await pg.shutdown()
        return grown.rank(), grown.group_name, await check_group(grown)


@pytest.mark.parametrize("transport", LINKS)
async def test_newcomers_of_a_grown_group_have_the_last_ranks(transport: str) -> None:
    where = {"store": HashStore(), "options": options(transport)}
    ranks = [run_member(where, rank, 3, grow_by_two) for rank in range(3)]
    results = await gather_results(*ranks, run_newcomer(where), run_newcomer(where))
    assert sorted(results) == [(rank, "world:0~1", (0, 1, 2, 3, 4)) for rank in range(5)]
    assert [rank for rank, *_ in results[:3]] == [0, 1, 2]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
async def test_newcomers_join_through_the_store_of_the_group(scheme: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"init_method": f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/store"}
    if scheme == "tcp":
        where["options"] = options("tcp")
    ranks = [run_member(where, rank, 2, grow_by_two) for rank in range(2)]
    results = await gather_results(run_newcomer(where), *ranks, run_newcomer(where))
    assert sorted(results) == [(rank, "world:0~1", (0, 1, 2, 3)) for rank in range(4)]
    assert os.listdir(tmp_path) == []


async def test_two_lost_ranks_rejoin_one_after_the_other() -> None:
    where = {"store": HashStore()}

    async def grow_and_check(pg: ProcessGroup) -> Any:
        await check_group(pg)
        async with await pg.grow(1) as larger:
            return larger.rank(), larger.group_name, await check_group(larger)

    async def rank(pg: ProcessGroup) -> list[Any]:
        if pg.rank() == 0:
            await pg.wait_revoked()
            await pg.shutdown()
            async with new_group(join=True, **where) as grown:
                return [await grow_and_check(grown)]
        async with await pg.shrink(exclude=[0]) as small, await small.grow(1) as grown:
            if pg.rank() == 2:
                return await asyncio.gather(grow_and_check(grown), run_newcomer(where))
            return [await grow_and_check(grown)]

    results = await gather_results(*(run_member(where, number, 3, rank) for number in range(3)))
    assert results == [
        [(2, "world:0~3", (0, 1, 2, 3))],
        [(0, "world:0~3", (0, 1, 2, 3))],
        [(1, "world:0~3", (0, 1, 2, 3)), (3, "world:0~3", (0, 1, 2, 3))],
    ]


async def test_grow_error_counts_too_few_newcomers_which_continue_to_wait() -> None:
    where = {"store": HashStore()}

    async def rank(pg: ProcessGroup) -> Any:
        with pytest.raises(RendezvousError, match=r"1 of 2 newcomers came within 0.3 s: start the others"):
            await pg.grow(2, timeout=0.3)
        assert await check_group(pg) == (0, 1)
        async with await pg.grow(1) as grown:
            return grown.rank(), grown.group_name, await check_group(grown)

    results = await gather_results(run_member(where, 0, 2, rank), run_member(where, 1, 2, rank), run_newcomer(where))
    assert results == [(rank, "world:0~1", (0, 1, 2)) for rank in range(3)]


async def test_newcomer_that_gives_up_is_not_assigned_a_rank() -> None:
    store = HashStore()
    where = {"store": store}

    async def rank(pg: ProcessGroup) -> Any:
        with pytest.raises(RendezvousError, match=r"no group has grown within 0\.05 s"):
            await new_group(join=True, timeout=0.05, **where)
        joining = asyncio.ensure_future(new_group(join=True, **where)._make())
        await wait_until(lambda: pending_waits(store))
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        with pytest.raises(RendezvousError, match="0 of 1 newcomers came"):
            await pg.grow(1, timeout=0.1)
        late = asyncio.ensure_future(run_newcomer(where))
        async with await pg.grow(1) as grown:
            await check_group(grown)
            return await late

    assert await gather_results(run_member(where, 0, 1, rank)) == [(1, "world:0~1", (0, 1))]


async def test_grow_requires_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    gone = asyncio.Event()
    master = await TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).open()

    async def rank(pg: ProcessGroup) -> Any:
        await pg.barrier()
        if pg.rank() == 0:
            await master.aclose()
            gone.set()
        await gone.wait()
        with pytest.raises(
            StoreUnavailableError, match=r"'world:0' cannot grow: the store .* is gone .* Restart all ranks"
        ):
            await pg.grow(1, timeout=5)
        return await check_group(pg)

    async def run_rank(number: int) -> Any:
        async with TCPStore("127.0.0.1", port, wait_for_workers=False) as store:
            return await run_member({"store": store}, number, 2, rank)

    assert await gather_results(run_rank(0), run_rank(1)) == [(0, 1)] * 2


async def test_grow_refuses_wrong_arguments() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        with pytest.raises(TypeError, match="n must be an int, not float"):
            await pg.grow(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="n=0: the number of newcomers"):
            await pg.grow(0)
        with pytest.raises(ValueError, match=r"called grow\(\) with n=\[1, 2\]: pass the same n"):
            await pg.grow(pg.rank() + 1)
        return await check_group(pg)

    assert await run_ranks(2, rank) == [(0, 1)] * 2
    with pytest.raises(ValueError, match="join=True: leave out rank, world_size, name and backend"):
        new_group(store=HashStore(), join=True, rank=1)


@pytest.mark.ranks(2)
async def test_grow_fails_on_the_other_ranks_if_rank_0_cancels_the_call(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pg.grow(1)
    else:
        with pytest.raises(RendezvousError, match="'world:0' did not grow: rank 0 was cancelled"):
            await pg.grow(1)
    assert current_process_group() is pg
    assert await check_group(pg) == (0, 1)


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
async def test_old_and_new_groups_can_close_in_any_order(pg: ProcessGroup) -> None:
    """Let each rank close its groups in a different order, some before other ranks have created the new group."""
    await wait_for_all_ranks(pg)
    pg.abort("to shrink")
    small = await pg.shrink()
    smaller = await small.shrink()
    groups = [pg, small, smaller]
    for group in [groups[(number + pg.rank()) % 3] for number in range(3)]:
        await group.shutdown()


async def test_group_survives_the_loss_of_two_hubs_in_one_loop_iteration(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(pg: ProcessGroup) -> Any:
        await pg.barrier()
        if pg.rank() == 3:
            for hub in (0, 1):
                comm_of(pg).endpoint.roster.record_loss(hub, "its process is gone")
        await pg.wait_revoked()
        if pg.rank() < 2:
            return None
        async with await pg.shrink() as small:
            return await check_group(small)

    assert await run_ranks(4, rank, transport="unix") == [None, None, (2, 3), (2, 3)]
    gc.collect()
    assert "never retrieved" not in caplog.text
