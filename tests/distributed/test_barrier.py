"""`aiocoll.distributed.barrier` completes after the collectives that were started before it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll import ProcessGroup, ReduceOp

LARGE = 1_000_000


@pytest.fixture(autouse=True)
def default_group(pg: ProcessGroup) -> Any:
    with aiocoll.process_group(pg):
        yield


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("count", [1, LARGE])
async def test_barrier_completes_after_earlier_collectives(pg: ProcessGroup, count: int) -> None:
    rank, size = pg.rank(), pg.size()
    reduced, copied = np.full(count, rank + 1.0), np.full(count, float(rank))
    gathered = np.empty(count * size)
    works = [dist.all_reduce(reduced), dist.broadcast(copied, size - 1), dist.all_gather_into_tensor(gathered, copied)]
    objects: list[Any] = [None] * size
    works.append(dist.all_gather_object(objects, rank))
    assert await dist.barrier() is None
    assert all(work.done() for work in works)
    assert reduced.tolist() == [size * (size + 1) / 2] * count
    assert copied.tolist() == [size - 1.0] * count
    assert objects == list(range(size))


@pytest.mark.ranks(2)
async def test_barrier_completes_after_the_collectives_of_an_earlier_coalescing_block(pg: ProcessGroup) -> None:
    tensors = [np.full(LARGE, pg.rank() + 1.0) for _ in range(3)]

    async def block() -> None:
        async with pg.coalescing():
            for tensor in tensors:
                pg.allreduce(tensor)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await dist.barrier()
    assert [tensor[-1] for tensor in tensors] == [3.0] * 3
    await task


@pytest.mark.ranks(2)
async def test_barrier_in_a_coalescing_block_waits_for_earlier_calls_of_the_block(pg: ProcessGroup) -> None:
    tensor = np.full(LARGE, pg.rank() + 1.0)
    async with pg.coalescing():
        pg.allreduce(tensor)
        barrier = dist.barrier()
        assert await barrier is None
        assert tensor[-1] == 3.0


@pytest.mark.ranks(2)
async def test_barrier_does_not_wait_for_messages_keyed_calls_or_later_calls(pg: ProcessGroup) -> None:
    x, y = np.ones(LARGE), np.ones(LARGE)
    other = 1 - pg.rank()
    received = pg.recv(x, other)
    keyed = pg.allreduce(y, key="late") if pg.rank() == 0 else None
    barrier = dist.barrier()
    if pg.rank() == 0:
        follows = pg.barrier()
        await barrier
        assert not received.done()
        await pg.send_object(None, 1, tag=1)
        await follows
    else:
        await barrier
        await pg.recv_object(0, tag=1)
        await pg.barrier()
        keyed = pg.allreduce(y, key="late")
    await pg.send(x, other)
    await received
    assert keyed is not None
    await keyed


@pytest.mark.ranks(2)
async def test_barrier_does_not_wait_for_collectives_of_other_groups(pg: ProcessGroup) -> None:
    async with await pg.split_group([0, 1]) as other:
        early = other.allreduce(1) if pg.rank() == 0 else None
        await dist.barrier()
        assert await (early or other.allreduce(1)) == 2


@pytest.mark.ranks(2)
async def test_barrier_raises_the_failure_of_an_earlier_collective(pg: ProcessGroup) -> None:
    def fail(a: Any, b: Any, out: Any) -> None:
        raise ValueError("on purpose")

    dist.all_reduce(np.ones(3), ReduceOp.custom(fail))
    with pytest.raises((aiocoll.GroupError, ValueError), match="on purpose"):
        await dist.barrier()


@pytest.mark.ranks(2)
async def test_barrier_without_pending_collectives_is_a_plain_process_group_barrier(pg: ProcessGroup) -> None:
    barrier = dist.barrier()
    assert (barrier.op, barrier.seq) == ("BARRIER", 1)
    await barrier


@pytest.mark.ranks(2)
async def test_process_group_barrier_does_not_wait_for_collectives(pg: ProcessGroup) -> None:
    """Check that `ProcessGroup.barrier` completes while an earlier allreduce is still pending."""
    slow = pg.allreduce(np.ones(8 * LARGE))
    await pg.barrier()
    done = slow.done()
    await slow
    assert not done


@pytest.mark.ranks(1)
async def test_barrier_refuses_the_async_op_argument_of_torch(pg: ProcessGroup) -> None:
    with pytest.raises(TypeError, match="device_ids must be a list of devices or None, not bool; async_op does not"):
        dist.barrier(None, True)  # type: ignore[arg-type]


@pytest.mark.ranks(1)
async def test_unawaited_new_group_call_is_refused_as_group_argument(pg: ProcessGroup) -> None:
    made = dist.new_group([0])
    with pytest.raises(TypeError, match="group must be a ProcessGroup or None, not Work; await the call that makes"):
        dist.all_reduce(1, group=made)  # type: ignore[arg-type]
    await made
