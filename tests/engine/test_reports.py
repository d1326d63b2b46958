"""`report_death` by the program, about unreachable ranks and about ranks that still live."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupRevokedError, PeerLostError, ProcessGroup

from ..internals import comm_of
from .hosts import Hosts
from .test_shrink import Job, check_group, now, wait_for_loss

REASON = "the operator has pulled the plug"


@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("lost", [[0, 1], [0, 2, 3], [1, 2, 3]])
def test_remaining_ranks_continue_after_a_reported_death(lost: list[int], when: str) -> None:
    """Put each rank on a separate host, so that the survivors have a quorum only if the program reports the deaths."""
    job = Job(Hosts(range(4)))
    left = [rank for rank in range(4) if rank not in lost]

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() in lost:
            await job.die(pg.rank())

        def report() -> None:
            for rank in lost:
                pg.report_death(rank, REASON)

        reporter = pg.rank() == left[-1]
        if when == "before" and reporter:
            asyncio.get_running_loop().call_later(0.99, report)
        cause = await wait_for_loss(pg)
        assert cause.how == ("killed" if when == "before" else "unreachable")
        start = now()
        if when == "within" and reporter:
            asyncio.get_running_loop().call_later(0.5, report)
        if when == "after":
            with pytest.raises(PeerLostError, match="no quorum without"):
                await pg.shrink()
            if reporter:
                report()
            await asyncio.sleep(1)  # one virtual second
        group = await pg.shrink()
        if when == "within":
            assert now() - start < 2.5  # lost ranks are not dialled again
        return await check_group(group)

    found = job.run(4, body)
    assert [found[rank] for rank in left] == [tuple(left)] * len(left)


@pytest.mark.ranks(3)
async def test_reported_death_reaches_all_ranks_with_its_reason(pg: ProcessGroup) -> None:
    pair = await pg.split_group([0, 1])
    if pg.rank() == 1:
        pg.report_death(2, REASON)
        pg.report_death(2, "again")
    cause = await pg.wait_revoked()
    assert isinstance(cause, PeerLostError)
    assert (str(cause), cause.how) == (f"rank 2 of group 'world:0' is gone: {REASON}", "killed")
    assert cause.ranks == (2,)
    if pair is not None:
        assert await pair.allreduce(1) == 2


@pytest.mark.parametrize("reporter", [0, 1, 3])
@pytest.mark.parametrize("victim", [0, 2])
def test_living_rank_that_is_reported_dead_is_excluded(victim: int, reporter: int) -> None:
    job = Job(Hosts([0, 0, 1, 1]))
    others = [rank for rank in range(4) if rank != victim]
    reporter = reporter or others[0]

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == reporter:
            pg.report_death(victim, REASON)
        cause = await wait_for_loss(pg)
        assert (cause.how, cause.ranks) == ("killed", (victim,))
        assert REASON in str(cause)
        if pg.rank() != victim:
            group = await pg.shrink()
            for _ in range(10):
                await check_group(group)
                await asyncio.sleep(1)  # a virtual second, in which the victim does all it can
            return await check_group(group)
        with pytest.raises(GroupError, match=rf"rank {victim} was declared dead .*{REASON}.*join=True"):
            await pg.shrink()
        endpoint = comm_of(pg).endpoint
        for rank in others:
            endpoint.roster.record_loss(rank, "a test", how="killed")
        with pytest.raises(GroupError, match="was declared dead by other ranks"):
            await pg.shrink(assume_dead=others)
        return None

    found = job.run(4, body)
    assert [found[rank] for rank in others] == [tuple(others)] * 3


def test_living_rank_with_a_late_report_learns_of_its_exclusion() -> None:
    """Cut off rank 2, which still waits for votes when the other ranks continue without rank 2."""
    job = Job(Hosts(range(3)))

    async def body(pg: ProcessGroup) -> Any:
        if pg.rank() == 2:
            for rank in range(2):
                job.hosts.cut(2, rank)
                job.hosts.cut(rank, 2)
        await wait_for_loss(pg)
        if pg.rank() < 2:
            pg.report_death(2, REASON)
            group = await pg.shrink()
            await check_group(group)
            for rank in range(2):
                job.hosts.heal(2, rank)
                job.hosts.heal(rank, 2)
            await asyncio.sleep(20)  # virtual seconds
            return await check_group(group)
        while True:
            with pytest.raises(GroupError) as raised:
                await pg.shrink()
            if not isinstance(raised.value, PeerLostError):
                return str(raised.value)

    first, second, third = job.run(3, body)
    assert first == second == (0, 1)
    assert "ranks 0, 1 continued without it" in third or "declared dead" in third


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("rank", "reason", "error", "message"),
    [
        (2, REASON, ValueError, "rank=2 is not a rank of group"),
        ("1", REASON, TypeError, "rank must be a rank"),
        (None, REASON, ValueError, "is this rank, which is alive"),
        (1, 5, TypeError, "reason must be a str, not int"),
    ],
)
async def test_invalid_death_report_is_refused(
    pg: ProcessGroup, rank: Any, reason: Any, error: type[Exception], message: str
) -> None:
    if rank == 1:
        rank = 1 - pg.rank()
    with pytest.raises(error, match=message):
        pg.report_death(pg.rank() if rank is None else rank, reason)
    assert await pg.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_long_reason_of_a_death_report_is_truncated(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        pg.report_death(1, "\ud800" + "x" * 100_000)
    cause = await pg.wait_revoked()
    assert 60_000 < len(str(cause)) < 70_000


@pytest.mark.ranks(2)
async def test_death_report_does_nothing_after_the_shutdown(pg: ProcessGroup) -> None:
    await pg.shutdown()
    pg.report_death(1 - pg.rank(), REASON)


@pytest.mark.ranks(3)
async def test_group_with_a_rank_that_is_reported_dead_is_revoked(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        pg.report_death(1, REASON)
    await pg.wait_revoked()
    with pytest.raises(GroupRevokedError):
        await pg.barrier()
    if pg.rank() != 1:
        async with await pg.shrink() as smaller:
            assert await smaller.allreduce(np.ones(2)) is not None
