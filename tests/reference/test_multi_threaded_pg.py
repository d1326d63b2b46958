"""Torch's tests of many ranks in one process, ported from threads to tasks."""

from __future__ import annotations

import asyncio
import math
import threading
import unittest
from typing import Any

import numpy as np
import pytest

import aiocoll.distributed as dist
from aiocoll import GroupError, ProcessGroup, ReduceOp, Work, current_process_group
from aiocoll.testing import InProcessTestCase, requires_module, spawn_ranks

COVERS = {
    "TestCollectivesWithWrapper.test_broadcast_object_list": "TestCollectivesWithWrapper.test_broadcast_object_list",
    "TestCollectivesWithWrapper.test_collective_error_on_rank_zero": (
        "TestCollectivesWithWrapper.test_collective_error_on_rank_zero"
    ),
    "TestCollectivesWithWrapper.test_collective_error_on_rank_non_zero": (
        "TestCollectivesWithWrapper.test_collective_error_on_rank_non_zero"
    ),
    "TestCollectivesWithWrapper.test_collective_error_on_rank_non_zero_all": (
        "TestCollectivesWithWrapper.test_collective_error_on_rank_non_zero_all"
    ),
    "TestCollectivesWithWrapper.test_skip": "TestCollectivesWithWrapper.test_skip",
    "TestCollectivesWithWrapper.test_all_to_all_single_tensor": (
        "TestCollectivesWithWrapper.test_all_to_all_single_tensor"
    ),
    "TestCollectivesWithWrapper.test_all_to_all_single_list": "TestCollectivesWithWrapper.test_all_to_all_single_list",
    "TestCollectivesWithWrapper.test_all_to_all_single_none": "TestCollectivesWithWrapper.test_all_to_all_single_none",
    "TestCollectivesWithBaseClass.test_allgather": "TestCollectivesWithBaseClass.test_allgather",
    "TestCollectivesWithBaseClass.test_broadcast": "TestCollectivesWithBaseClass.test_broadcast",
    "TestCollectivesWithBaseClass.test_scatter": "TestCollectivesWithBaseClass.test_scatter",
    "TestCollectivesWithBaseClass.test_reduce_scatter": "TestCollectivesWithBaseClass.test_reduce_scatter",
    "TestCollectivesWithBaseClass.test_broadcast_object_list": (
        "TestCollectivesWithBaseClass.test_broadcast_object_list"
    ),
    "TestCollectivesWithBaseClass.test_all_reduce": "TestCollectivesWithBaseClass.test_all_reduce",
    "TestCollectivesWithBaseClass.test_all_to_all": "TestCollectivesWithBaseClass.test_all_to_all",
    "TestCollectivesWithBaseClass.test_all_reduce_ops": "TestCollectivesWithBaseClass.test_all_reduce_ops",
    "TestCollectivesWithBaseClass.test_assert_equal_on_rank": "TestCollectivesWithBaseClass.test_assert_equal_on_rank",
    "TestCollectivesWithBaseClass.test_subpg": "TestCollectivesWithBaseClass.test_subpg",
    "TestCollectivesWithBaseClass.test_all_reduce_coalesced": "TestCollectivesWithBaseClass.test_all_reduce_coalesced",
    "TestCollectivesWithBaseClass.test_using_pg_from_another_thread": (
        "TestCollectivesWithBaseClass.test_using_pg_from_another_thread"
    ),
    "TestCollectivesWithBaseClass.test_gather": "TestCollectivesWithBaseClass.test_gather",
    "TestCollectivesWithBaseClass.test_bwd_sees_fwd_pg": "TestCollectivesWithBaseClass.test_bwd_sees_fwd_pg",
}

LEFT_OUT: dict[str, str] = {}


def filled(value: float) -> np.ndarray:
    return np.full((3, 3), float(value))


async def fail_between_two_gathers(pg: ProcessGroup, failing: range) -> None:
    outputs = await pg.allgather(None, filled(pg.rank()))
    assert len(outputs) == pg.size()
    if pg.rank() in failing:
        raise AssertionError("Mimic real test failure.")
    await pg.allgather(None, filled(pg.rank()))


class TestCollectivesWithWrapper:
    @spawn_ranks(4)
    async def test_broadcast_object_list(self, pg: ProcessGroup) -> None:
        """Check that all ranks of a `spawn_ranks` test receive the object of rank 0."""
        objects = [99 if pg.rank() == 0 else None] * pg.size()
        assert (await pg.broadcast_object(objects, 0))[0] == 99

    async def test_collective_error_on_rank_zero(self) -> None:
        """Check that an exception on rank 0 fails the test and releases the other ranks."""
        await self._check_failure(range(1))

    async def test_collective_error_on_rank_non_zero(self) -> None:
        """Check that an exception on rank 1 fails the test and releases the other ranks."""
        await self._check_failure(range(1, 2))

    async def test_collective_error_on_rank_non_zero_all(self) -> None:
        """Check that exceptions on the ranks 1 to 3 fail the test and release rank 0."""
        await self._check_failure(range(1, 4))

    async def _check_failure(self, failing: range) -> None:
        released: list[int] = []

        @spawn_ranks(4)
        async def test_method(pg: ProcessGroup) -> None:
            try:
                await fail_between_two_gathers(pg, failing)
            except GroupError:
                released.append(pg.rank())
                raise

        with pytest.raises(AssertionError, match=r"Mimic real test failure\.") as caught:
            await test_method()
        first, *others = caught.value.__notes__
        assert first in [f"rank {rank} of 4 failed first" for rank in failing]
        assert all("failed too: AssertionError" in note for note in others)
        assert len(others) == len(failing) - 1
        assert sorted(released) == [rank for rank in range(4) if rank not in failing]

    async def test_skip(self) -> None:
        """Check that a skip by the decorator or on a rank skips a `spawn_ranks` test."""

        @spawn_ranks(4)
        @unittest.skip("check if skip exception can be captured correctly.")
        async def outside(pg: ProcessGroup) -> None: ...

        @spawn_ranks(4)
        async def inside(pg: ProcessGroup) -> None:
            raise unittest.SkipTest("check if skip exception can be captured correctly.")

        for test_method in (outside, inside):
            with pytest.raises(unittest.SkipTest, match="can be captured correctly"):
                await test_method()

    @spawn_ranks(4)
    async def test_all_to_all_single_tensor(self, pg: ProcessGroup) -> None:
        """Check an all-to-all in one array whose block sizes are passed as arrays."""
        await self._check_all_to_all_single(pg, np.ones(4, dtype=np.int64), np.ones(4, dtype=np.int64))

    @spawn_ranks(4)
    async def test_all_to_all_single_list(self, pg: ProcessGroup) -> None:
        """Check an all-to-all in one array whose block sizes are passed as lists."""
        await self._check_all_to_all_single(pg, [1] * 4, [1] * 4)

    @spawn_ranks(4)
    async def test_all_to_all_single_none(self, pg: ProcessGroup) -> None:
        """Check an all-to-all in one array without block sizes: all blocks have the same size."""
        await self._check_all_to_all_single(pg)

    async def _check_all_to_all_single(self, pg: ProcessGroup, *sizes: Any) -> None:
        sent = np.full((4, 2), pg.rank())
        out = np.zeros((4, 2), dtype=sent.dtype)
        await pg.alltoall_base(out, sent, *sizes)
        assert out.tolist() == [[rank, rank] for rank in range(4)]


class TestCollectivesWithBaseClass(InProcessTestCase):
    world_size = 4

    async def test_allgather(self) -> None:
        """Check that each rank gathers the arrays of all ranks, in rank order."""
        outputs = await self.pg.allgather([np.empty((3, 3)) for _ in range(4)], filled(self.rank))
        for rank, output in enumerate(outputs):
            np.testing.assert_array_equal(output, filled(rank))

    async def test_broadcast(self) -> None:
        """Check that all ranks have the root's array after a broadcast from each root."""
        for root in range(4):
            np.testing.assert_array_equal(await self.pg.broadcast(filled(self.rank), root), filled(root))

    async def test_scatter(self) -> None:
        """Check that each rank receives its array from rank 0."""
        inputs = [filled(rank) for rank in range(4)] if self.rank == 0 else None
        np.testing.assert_array_equal(await self.pg.scatter(np.empty((3, 3)), inputs, 0), filled(self.rank))

    async def test_reduce_scatter(self) -> None:
        """Check that each rank has the sum or the average of its block after a reduce-scatter."""
        inputs = [filled(rank) for rank in range(4)]
        for op, factor in ((ReduceOp.SUM, 4), (ReduceOp.AVG, 1)):
            output = await self.pg.reduce_scatter(np.empty((3, 3)), inputs, op)
            np.testing.assert_array_equal(output, filled(self.rank * factor))

    async def test_broadcast_object_list(self) -> None:
        """Check that all ranks of an `InProcessTestCase` receive the object of rank 0."""
        objects = [99 if self.rank == 0 else None] * 4
        assert (await self.pg.broadcast_object(objects, 0))[0] == 99

    async def test_all_reduce(self) -> None:
        """Check that an allreduce gives the sum of all ranks' arrays."""
        np.testing.assert_array_equal(await self.pg.allreduce(filled(self.rank)), filled(6))

    async def test_all_to_all(self) -> None:
        """Check that each rank receives the arrays that all ranks send to it, in rank order."""
        inputs = [filled(x) for x in range(self.rank * 4, self.rank * 4 + 4)]
        outputs = await self.pg.alltoall([np.empty((3, 3)) for _ in range(4)], inputs)
        np.testing.assert_array_equal(outputs, [filled(x) for x in range(self.rank, 16, 4)])

    async def test_all_reduce_ops(self) -> None:
        """Check the results of an allreduce with each reduction except sum and average."""
        for op, expected in {
            ReduceOp.PRODUCT: math.factorial(4),
            ReduceOp.MIN: 1,
            ReduceOp.MAX: 4,
            ReduceOp.BAND: 1 & 2 & 3 & 4,
            ReduceOp.BOR: 1 | 2 | 3 | 4,
            ReduceOp.BXOR: 1 ^ 2 ^ 3 ^ 4,
        }.items():
            assert (await self.pg.allreduce(np.array([self.rank + 1]), op)).item() == expected

    async def test_assert_equal_on_rank(self) -> None:
        """Check that `assertEqualOnRank` and `assertNotEqualOnRank` compare only on the given rank."""
        mine = np.random.default_rng(self.rank).random((3, 3))
        of_rank_0 = await self.pg.broadcast(mine.copy(), 0)
        self.assertEqualOnRank(of_rank_0, mine, rank=0)
        self.assertNotEqualOnRank(of_rank_0, mine, rank=1)

    async def test_subpg(self) -> None:
        """Check that an allreduce in a subgroup sums the arrays of its members only."""
        mine = [0, 1] if self.rank < 2 else [2, 3]
        halves = [await self.pg.split_group(ranks) for ranks in ([0, 1], [2, 3])]
        (half,) = [group for group in halves if group is not None]
        assert half is halves[self.rank // 2]
        np.testing.assert_array_equal(await half.allreduce(filled(self.rank)), filled(sum(mine)))

    async def test_using_pg_from_another_thread(self) -> None:
        """Check that a thread can make calls through `asyncio.run_coroutine_threadsafe`."""
        loop = asyncio.get_running_loop()

        async def reduce() -> int:
            return await self.pg.allreduce(self.rank)

        def in_another_thread() -> int:
            return asyncio.run_coroutine_threadsafe(reduce(), loop).result()

        assert await asyncio.to_thread(in_another_thread) == 6

    async def test_gather(self) -> None:
        """Check that rank 0 gathers the arrays of all ranks, in rank order."""
        outputs = [np.empty((3, 3)) for _ in range(4)] if self.rank == 0 else None
        gathered = await self.pg.gather(outputs, filled(self.rank), 0)
        if self.rank == 0:
            np.testing.assert_array_equal(gathered, [filled(rank) for rank in range(4)])

    async def test_all_reduce_coalesced(self) -> None:
        """Check that one coalesced allreduce sums each array of a list."""
        tensors = [np.full((3, 3), float(self.rank)), np.full((3, 3), 2.0 * self.rank)]
        await self.pg.allreduce_coalesced(tensors)
        np.testing.assert_array_equal(tensors[0], np.full((3, 3), 6.0))
        np.testing.assert_array_equal(tensors[1], np.full((3, 3), 12.0))

    @pytest.mark.torch
    @requires_module("torch")
    async def test_bwd_sees_fwd_pg(self) -> None:
        """Start a collective in autograd's `backward`, which cannot await; the test awaits the work afterwards."""
        import torch

        thread = threading.get_ident()
        works: list[Work[Any]] = []

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rank: Any) -> Any:
                assert int(rank) == dist.get_rank()
                ctx.save_for_backward(rank)
                return 2 * rank

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                (rank,) = ctx.saved_tensors
                assert threading.get_ident() == thread
                assert dist.is_initialized()
                assert int(rank) == dist.get_rank()
                works.append(dist.all_reduce(2 * rank.detach()))
                return 2 * gradient

        rank = torch.tensor([float(self.rank)], requires_grad=True)
        Double.apply(rank).sum().backward()
        assert [float(await work) for work in works] == [12.0]
        assert rank.grad is not None
        assert float(rank.grad) == 2.0

    async def test_thread_inherits_the_current_group_of_the_rank_that_started_it(self) -> None:
        loop = asyncio.get_running_loop()

        async def reduce(group: ProcessGroup, value: int) -> int:
            return await group.allreduce(value)

        def backward() -> int:
            group = current_process_group()
            assert group is self.pg
            return asyncio.run_coroutine_threadsafe(reduce(group, 2 * group.rank()), loop).result()

        assert await asyncio.to_thread(backward) == 12
