"""A function that makes all calls on every rank, and compares each result with its closed form."""

from __future__ import annotations

import numpy as np

from aiocoll import ProcessGroup, Recv, ReduceOp, Send

#: Elements per rank, which as float64 exceed an eager window.
LARGE = 100_003


def block(rank: int, count: int) -> np.ndarray:
    """Return the contribution of `rank`: integer values, so that sums are exact in float64."""
    return np.arange(count, dtype="f8") + rank


async def make_all_calls(pg: ProcessGroup, counts: tuple[int, ...] = (1, 1000, LARGE)) -> int:
    """Make every call with each count; return the number of counts."""
    for count in counts:
        await reductions(pg, count)
        await movements(pg, count)
        await messages(pg, count)
    await scalars_and_objects(pg)
    await pg.barrier()
    return len(counts)


async def reductions(pg: ProcessGroup, count: int) -> None:
    rank, size = pg.rank(), pg.size()
    ranks = size * (size - 1) // 2
    total = size * np.arange(count) + ranks
    np.testing.assert_array_equal(await pg.allreduce(block(rank, count)), total)
    np.testing.assert_array_equal(await pg.allreduce(block(rank, count), ReduceOp.MAX), block(size - 1, count))
    np.testing.assert_array_equal(await pg.scan(block(rank, count)), sum(block(r, count) for r in range(rank + 1)))
    below = sum(block(r, count) for r in range(rank)) if rank else block(0, count)
    np.testing.assert_array_equal(await pg.exscan(block(rank, count)), below)
    for root in {0, size - 1}:
        got = await pg.reduce(block(rank, count), root)
        np.testing.assert_array_equal(got, total if rank == root else block(rank, count))
    # Rank s contributes block(s + r) to the sum on rank r.
    inputs = [block(rank + r, count) for r in range(size)]
    expected = size * np.arange(count) + ranks + size * rank
    np.testing.assert_array_equal(await pg.reduce_scatter(np.empty(count), inputs), expected)
    np.testing.assert_array_equal(await pg.reduce_scatter_tensor(np.empty(count), np.concatenate(inputs)), expected)


async def movements(pg: ProcessGroup, count: int) -> None:
    rank, size = pg.rank(), pg.size()
    everything = np.concatenate([block(r, count) for r in range(size)])
    mine = block(rank, count)
    for root in {0, size - 1}:
        np.testing.assert_array_equal(await pg.broadcast(block(rank, count), root), block(root, count))
        gathered = await pg.gather(None, mine, root)
        assert (gathered is not None) == (rank == root)
        if gathered is not None:
            np.testing.assert_array_equal(np.concatenate(gathered), everything)
        inputs = [block(r, count) for r in range(size)] if rank == root else None
        np.testing.assert_array_equal(await pg.scatter(np.empty(count), inputs, root), mine)
    np.testing.assert_array_equal(np.concatenate(await pg.allgather(None, mine)), everything)
    np.testing.assert_array_equal(await pg.allgather_into_tensor(np.empty(size * count), mine), everything)
    # Rank s sends block(s + r) to rank r.
    inputs = [block(rank + r, count) for r in range(size)]
    outputs = await pg.alltoall([np.empty(count) for _ in range(size)], inputs)
    np.testing.assert_array_equal(outputs, inputs)
    flat = np.concatenate(inputs)
    np.testing.assert_array_equal(await pg.alltoall_base(np.empty(size * count), flat), flat)


async def messages(pg: ProcessGroup, count: int) -> None:
    rank, size = pg.rank(), pg.size()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    sending = pg.send(block(rank, count), right)
    np.testing.assert_array_equal(await pg.recv(np.empty(count), left), block(left, count))
    await sending
    sending = pg.send(block(rank, count), left, tag=1)
    receiving = pg.recv_anysource(np.empty(count), tag=1)
    np.testing.assert_array_equal(await receiving, block(right, count))
    assert receiving.source_rank() == right
    await sending
    _, got = await pg.batch([Send(block(rank, count), right, 2), Recv(np.empty(count), left, 2)])
    np.testing.assert_array_equal(got, block(left, count))


async def scalars_and_objects(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    assert await pg.allreduce(rank) == size * (size - 1) // 2
    last = size - 1
    everyone = [{"rank": r} for r in range(size)]
    assert await pg.broadcast_object(("hello", rank), last) == ("hello", last)
    assert await pg.allgather_object({"rank": rank}) == everyone
    assert await pg.gather_object({"rank": rank}, last) == (everyone if rank == last else None)
    assert await pg.scatter_object(everyone if rank == last else None, last) == {"rank": rank}
    assert await pg.alltoall_object([(rank, r) for r in range(size)]) == [(r, rank) for r in range(size)]
    if size > 1:
        sending = pg.send_object({rank}, (rank + 1) % size)
        assert await pg.recv_object((rank - 1) % size) == {(rank - 1) % size}
        await sending
    assert await pg.allreduce(1.5, key="last") == 1.5 * size
