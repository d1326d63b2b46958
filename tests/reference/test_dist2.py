"""Torch's tests of `ProcessGroup` objects (test_dist2.py), ported to `await`, over every transport."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

import aiocoll
from aiocoll import HashStore, ProcessGroup, ReduceOp, TCPStore

from ..ranks import LINKS, parametrize_transports, run_ranks

COVERS = {
    "ProcessGroupTest.test_context_manager": "test_context_manager",
    **{
        f"ProcessGroupGlooTest.{name}": name
        for name in (
            "test_allreduce",
            "test_barrier",
            "test_broadcast",
            "test_allgather",
            "test_gather",
            "test_scatter",
            "test_reduce",
            "test_reduce_scatter",
            "test_alltoall_base",
            "test_group_split",
            "test_remote_group_merge",
        )
    },
}
LEFT_OUT = {
    name.replace("Gloo", "NCCL"): "the same test between two GPUs; tests/gpu has it with simulated GPUs"
    for name in COVERS
    if "Gloo" in name
}

LIMIT = timedelta(seconds=30)


def filled(value: float, count: int = 10) -> np.ndarray:
    return np.full(count, value, np.float32)


async def test_context_manager() -> None:
    """Check that `aiocoll.process_group` sets the current group, and restores the previous group at its end."""
    store = HashStore()

    def new_group() -> aiocoll.new_group:
        return aiocoll.new_group(store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), device="cpu")

    async with new_group() as pg1, new_group() as pg2:
        assert aiocoll.current_process_group() is None
        with aiocoll.process_group(pg1):
            assert aiocoll.current_process_group() is pg1
            with aiocoll.process_group(pg2):
                assert aiocoll.current_process_group() is pg2
            assert aiocoll.current_process_group() is pg1
        assert aiocoll.current_process_group() is None
    await store.aclose()


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_allreduce(pg: ProcessGroup) -> None:
    """Check that an allreduce of ones over two ranks gives twos."""
    t = filled(1)
    await pg.allreduce(t, timeout=LIMIT)
    np.testing.assert_array_equal(t, filled(2))
    await pg.shutdown()


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_barrier(pg: ProcessGroup) -> None:
    """Check that a barrier of two ranks completes within its timeout."""
    await pg.barrier(timeout=LIMIT)
    await pg.shutdown()


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_broadcast(pg: ProcessGroup) -> None:
    """Check that both ranks have the array of rank 0 after a broadcast."""
    t = filled(pg.rank())
    await pg.broadcast(t, root=0, timeout=LIMIT)
    np.testing.assert_array_equal(t, filled(0))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_allgather(pg: ProcessGroup) -> None:
    """Check that each rank gathers the arrays of both ranks, in rank order."""
    out = [filled(0) for _ in range(2)]
    await pg.allgather(out, filled(pg.rank() + 1), timeout=LIMIT)
    for rank in range(2):
        np.testing.assert_array_equal(out[rank], filled(rank + 1))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_gather(pg: ProcessGroup) -> None:
    """Check that rank 0 gathers the arrays of both ranks, in rank order."""
    out = [filled(0) for _ in range(2)] if pg.rank() == 0 else []
    await pg.gather(out, filled(pg.rank() + 1), root=0, timeout=LIMIT)
    for rank, each in enumerate(out):
        np.testing.assert_array_equal(each, filled(rank + 1))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_scatter(pg: ProcessGroup) -> None:
    """Check that each rank receives its array from rank 0."""
    inputs = [filled(rank + 1) for rank in range(2)] if pg.rank() == 0 else []
    out = filled(0)
    await pg.scatter(out, inputs, root=0, timeout=LIMIT)
    np.testing.assert_array_equal(out, filled(pg.rank() + 1))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_reduce(pg: ProcessGroup) -> None:
    """Check that rank 0 has the sum after a reduce, and rank 1 has its own array."""
    t = filled(1)
    await pg.reduce(t, root=0, op=ReduceOp.SUM, timeout=LIMIT)
    np.testing.assert_array_equal(t, filled(2 if pg.rank() == 0 else 1))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_reduce_scatter(pg: ProcessGroup) -> None:
    """Check that each rank has the sum of its block after a reduce-scatter."""
    out = filled(0)
    await pg.reduce_scatter(out, [filled(rank + 1) for rank in range(2)], op=ReduceOp.SUM, timeout=LIMIT)
    np.testing.assert_array_equal(out, filled(2 * (pg.rank() + 1)))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_alltoall_base(pg: ProcessGroup) -> None:
    """Check that the ranks exchange blocks of explicit sizes in one array."""
    out = filled(0, 20)
    await pg.alltoall_base(out, filled(pg.rank() + 1, 20), [10, 10], [10, 10], timeout=LIMIT)
    np.testing.assert_array_equal(out, np.repeat(np.float32([1, 2]), 10))


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_group_split(pg: ProcessGroup) -> None:
    """Check that a subgroup has the given name and timeout, and that ranks outside of it get None."""
    subgroup = await pg.split_group([0], timeout=LIMIT, group_name="subgroup_1")
    if pg.rank() == 0:
        assert subgroup is not None
        assert subgroup.size() == 1
        assert subgroup.timeout == 30.0
        assert subgroup.group_name == "subgroup_1"
    else:
        assert subgroup is None


@pytest.mark.parametrize("transport", LINKS)
async def test_remote_group_merge(transport: str) -> None:
    """Check that two groups of one rank become one group over a store."""
    async with TCPStore("127.0.0.1", 0, world_size=2, is_master=True, wait_for_workers=False) as hosted:

        async def body(pg: ProcessGroup) -> None:
            subgroup_1 = await pg.split_group([0], timeout=LIMIT)
            subgroup_2 = await pg.split_group([1], timeout=LIMIT)
            mine = subgroup_1 if pg.rank() == 0 else subgroup_2
            assert mine is not None
            async with TCPStore("127.0.0.1", hosted.port, world_size=2, wait_for_workers=False) as store:
                merged = await mine.merge_remote_group(store, 2, timedelta(seconds=40), "merged_pg")
                assert merged.size() == 2
                assert merged.timeout == 40.0
                assert merged.group_name == "merged_pg"
                assert await merged.allreduce(1 + merged.rank()) == 3
                await merged.shutdown()

        await run_ranks(2, body, transport=transport)
