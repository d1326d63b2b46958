"""Groups made from what is left of others, over every transport; the agreement itself is in `engine/test_shrink.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    GroupRevokedError,
    ProcessGroup,
)
from aiocoll.engine.completed import Completed, combine

from .ranks import TRANSPORTS, run_ranks


async def works(pg: ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group in which everything arrives."""
    tensor = np.full(100_000, 2.0 ** pg.rank())
    await pg.allreduce(tensor)
    assert (tensor == 2.0 ** pg.size() - 1).all()
    assert await pg.allgather_object(pg.rank()) == list(range(pg.size()))
    return pg.global_ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_aborted_group_is_shrunk_and_all_stay(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        pg.abort(f"by rank {pg.rank()}")
        cause = await pg.wait_revoked()
        async with await pg.shrink() as small:
            assert await works(small) == (0, 1, 2)
            assert (small.rank(), small.size(), small.group_name) == (pg.rank(), 3, "world:0~1")
            assert small.timeout == pg.timeout
            with pytest.raises(GroupRevokedError) as raised:
                pg.barrier()
            assert raised.value.__cause__ is cause

    await run_ranks(3, rank, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_healthy_group_goes_on_without_the_excluded(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> Any:
        await pg.allreduce(1)
        if pg.rank() == 1:
            with pytest.raises(GroupError, match=r"went on as a new group|given up"):
                await pg.recv_object(0)
            with pytest.raises(GroupError, match="rank 1 was excluded: ranks 0, 2, 3 went on without it"):
                await pg.shrink()
            return None
        small = await pg.shrink(exclude=[1])
        ranks = await works(small)
        await pg.shutdown()
        async with await small.shrink(exclude={0}) if small.rank() else small as smaller:
            if small.rank():
                assert smaller.group_name == "world:0~2"
                ranks += await works(smaller)
        await small.shutdown()
        return ranks

    assert await run_ranks(4, rank, transport=transport) == [(0, 2, 3), None, *[(0, 2, 3, 2, 3)] * 2]


async def test_a_mismatch_keeps_all_ranks() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        with pytest.raises(CollectiveMismatchError):
            await pg.allreduce(np.ones(3 + pg.rank()))
        async with await pg.shrink() as small:
            return await works(small)

    assert await run_ranks(2, rank) == [(0, 1)] * 2


async def test_a_timeout_keeps_all_ranks() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        if pg.rank():
            with pytest.raises(CollectiveTimeoutError):
                await pg.barrier(timeout=0.3)
        else:
            assert isinstance(await pg.wait_revoked(), CollectiveTimeoutError)
        async with await pg.shrink() as small:
            return await works(small)

    assert await run_ranks(3, rank, transport="unix") == [(0, 1, 2)] * 3


async def test_what_was_completed_is_told() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        await pg.barrier()
        await pg.allreduce(1, key="a")
        await pg.allreduce(1, key="b")
        await pg.allreduce(1, key="a")
        # Rank 0 needs nobody to broadcast, rank 2 has its part, rank 1 does not come.
        if pg.rank() != 1:
            await pg.broadcast(np.ones(3), 0)
            await pg.broadcast(np.ones(3), 0, key="b")
        pending = [pg.barrier() for _ in range(2)] if pg.rank() == 0 else []
        for _ in range(pg.size() - 1):  # everybody is where it should be
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

    await run_ranks(3, rank)


def test_reports_are_put_together() -> None:
    reports = [
        {"upto": 9, "missing": [4, 8], "keyed": [["x", 1], ["y", 2]]},
        {"upto": 6, "missing": [], "keyed": [["x", 1]]},
        {"upto": 9, "missing": [3, 8, 9], "keyed": [["x", 1], ["y", 1]]},
    ]
    everywhere, somewhere = combine(reports)
    each = [Completed.of(told) for told in reports]
    for op in range(12):
        assert (op in everywhere) is all(op in one for one in each)
        assert (op in somewhere) is any(op in one for one in each)
    assert everywhere.keyed == {("x", 1)}
    assert somewhere.keyed == {("x", 1), ("y", 1), ("y", 2)}
    assert Completed.of(somewhere.told()) == somewhere


def test_a_report_fits_into_a_control_frame() -> None:
    crowd = Completed(100_000, frozenset(range(1, 100_000, 2)), frozenset((f"{key:0100}", 1) for key in range(5000)))
    told = crowd.told()
    assert len(told["missing"]) == 10_000
    assert told["upto"] == 20_000
    assert told["keyed"] == [(f"{key:0100}", 1) for key in range(303)]


async def test_wrong_calls() -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"exclude=2 is not a rank of group 'world:0'"):
            await pg.shrink(exclude=[2])
        with pytest.raises(TypeError, match="exclude must be a rank"):
            await pg.shrink(exclude=["0"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=f"exclude names rank {pg.rank()}, which is calling"):
            await pg.shrink(exclude=[pg.rank()])
        await pg.barrier()  # none of that did any harm
        work = asyncio.ensure_future(pg.shrink())
        await asyncio.sleep(0)
        if pg.rank():
            with pytest.raises(RuntimeError, match="under way already"):
                await pg.shrink()
        small = await work
        with pytest.raises(GroupError, match="'world:0' was shrunk before on rank"):
            await pg.shrink()
        await pg.shutdown()
        with pytest.raises(GroupClosedError):
            await pg.shrink()
        await works(small)
        await small.shutdown()

    await run_ranks(2, rank)


async def test_a_group_of_one_shrinks() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        pg.abort("alone")
        async with await pg.shrink() as small:
            return await works(small)

    assert await run_ranks(1, rank) == [(0,)]
