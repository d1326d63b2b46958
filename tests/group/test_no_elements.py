"""Arrays with no elements or no dimensions in every call: on all ranks, or on some ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.group.messages import Recv, Send
from aiocoll.testing.virtual import run_virtual

from ..ranks import LINKS, parametrize_transports

SIZES = (1, 2, 3, 4, 7)
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (3, 0), (0, 4), (2, 0, 3), ())
#: One op of each kind: any order, by float32, with a last step, with a first step, on bits, in rank order.
OPS: tuple[tuple[str, ReduceOp], ...] = (
    ("float32", ReduceOp.SUM),
    ("float16", ReduceOp.SUM),
    ("int64", ReduceOp.AVG),
    ("complex64", ReduceOp.PREMUL_SUM(2)),
    ("bool", ReduceOp.BXOR),
    ("float64", ReduceOp.custom(np.add, commutative=False)),
)


def result_of(dtype: str, op: ReduceOp, size: int) -> Any:
    """Return the result of a reduction in which each rank contributes the number 1."""
    return {"SUM": size, "add": size, "AVG": 1, "PREMUL_SUM": 2 * size, "BXOR": size % 2 == 1}[op.name]


async def check_reductions(pg: ProcessGroup, shape: tuple[int, ...]) -> None:
    rank, size = pg.rank(), pg.size()
    for dtype, op in OPS:

        def ones(shape: tuple[int, ...] = shape, dtype: str = dtype) -> Any:
            return np.ones(shape, dtype)

        right = np.full(shape, result_of(dtype, op, size), dtype)
        for tensor, work in ((t := ones(), pg.allreduce(t, op)), (t := ones(), pg.allreduce(t, op, key="k"))):
            assert await work is tensor
            assert np.array_equal(tensor, right)
        tensor = ones()
        assert await pg.reduce(tensor, size - 1, op) is tensor
        assert np.array_equal(tensor, right if rank == size - 1 else ones())
        if op.name != "AVG":
            assert (await pg.scan(ones(), op)).shape == shape
            assert (await pg.exscan(ones(), op)).shape == shape
        output = np.zeros(shape, dtype)
        assert await pg.reduce_scatter(output, [ones() for _ in range(size)], op) is output
        assert np.array_equal(output, right)
        output = np.zeros(shape, dtype)
        await pg.reduce_scatter_tensor(output, np.ones((size, *shape), dtype), op)
        assert np.array_equal(output, right)


async def check_movements(pg: ProcessGroup, shape: tuple[int, ...]) -> None:
    rank, size = pg.rank(), pg.size()
    is_root = rank == size - 1

    def own_array() -> Any:
        return np.full(shape, rank, np.int32)

    def blank_arrays() -> list[Any]:
        return [np.full(shape, -1, np.int32) for _ in range(size)]

    def is_right(arrays: Any) -> bool:
        return all(each.shape == shape and (each == by).all() for by, each in enumerate(arrays))

    assert (await pg.broadcast(own_array(), size - 1) == size - 1).all()
    assert is_right(await pg.allgather(blank_arrays(), own_array()))
    assert is_right(await pg.allgather(None, own_array()))
    whole = np.full((size, *shape), -1, np.int32)
    assert await pg.allgather_into_tensor(whole, own_array()) is whole
    assert is_right(whole)
    gathered = await pg.gather(blank_arrays() if is_root else None, own_array(), size - 1)
    assert is_right(gathered) if is_root else gathered is None
    inputs = [np.full(shape, to, np.int32) for to in range(size)]
    assert (await pg.scatter(blank_arrays()[0], inputs if is_root else None, size - 1) == rank).all()
    assert is_right(await pg.alltoall(blank_arrays(), [own_array() for _ in range(size)]))
    into = np.full((size, *shape), -1, np.int32)
    assert await pg.alltoall_base(into, np.full((size, *shape), rank, np.int32)) is into
    assert is_right(into)


async def check_messages(pg: ProcessGroup, shape: tuple[int, ...]) -> None:
    rank, size = pg.rank(), pg.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = np.full(shape, rank, np.float32)
    objects = await pg.allgather_object(sent)
    assert all(each.shape == shape and (each == by).all() for by, each in enumerate(objects))
    shared = await pg.empty(shape, "float32")
    shared[...] = 1
    assert (await pg.allreduce(shared) == size).all()
    if size == 1:
        return

    async def receive(tag: int, source: int | None) -> None:
        got = np.full(shape, -1, np.float32)
        work = pg.recv_anysource(got, tag) if source is None else pg.recv(got, source, tag)
        assert await work is got
        assert (got == before).all()
        assert work.source_rank() == before

    sending = [pg.send(sent, after, tag) for tag in (0, 1)]
    await receive(0, before)
    await receive(1, None)
    for work in sending:
        await work
    got = np.full(shape, -1, np.float32)
    await pg.batch([Send(sent, after), Recv(got, before)])
    assert (got == before).all()


async def check_every_call(pg: ProcessGroup, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
    for shape in shapes:
        await check_reductions(pg, shape)
        await check_movements(pg, shape)
        await check_messages(pg, shape)
    assert not pg.pending()


@pytest.mark.ranks(*SIZES)
async def test_empty_arrays_work_in_every_call(pg: ProcessGroup) -> None:
    await check_every_call(pg)


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS[1:])
async def test_empty_arrays_work_over_every_transport(pg: ProcessGroup) -> None:
    await check_every_call(pg)


@pytest.mark.matrix
@pytest.mark.ranks(*SIZES)
@parametrize_transports(*LINKS)
async def test_empty_arrays_work_in_every_call_at_every_world_size(pg: ProcessGroup) -> None:
    await check_every_call(pg)


def test_empty_arrays_work_with_delayed_frames() -> None:
    run_virtual(4, check_every_call, ((3, 0), ()), latency=(0.0001, 0.01))


@pytest.mark.ranks(*SIZES)
async def test_data_of_the_only_rank_with_elements_is_transferred(pg: ProcessGroup) -> None:
    size, rank = pg.size(), pg.rank()
    for holder in range(size):
        counts = [4 * (each == holder) for each in range(size)]
        own_array = np.full(counts[rank], 7)
        parts = [np.full(count, 7) for count in counts]
        for root in {0, size - 1}:
            is_root = rank == root
            gathered = await pg.gather([np.zeros(count, int) for count in counts] if is_root else None, own_array, root)
            assert gathered is None or all(map(np.array_equal, gathered, parts))
            got = await pg.scatter(np.zeros(counts[rank], int), parts if is_root else None, root)
            assert np.array_equal(got, own_array)
        gathered = await pg.allgather([np.zeros(count, int) for count in counts], own_array)
        assert all(map(np.array_equal, gathered, parts))
        got = await pg.reduce_scatter(np.zeros(counts[rank], int), parts)
        assert np.array_equal(got, own_array * size)
        # In this alltoall, only rank `holder` sends data, and only to the next rank.
        target = (holder + 1) % size
        sends = [4 * (rank == holder and to == target) for to in range(size)]
        comes = [4 * (rank == target and by == holder) for by in range(size)]
        into = np.zeros((sum(comes), 2), int)
        await pg.alltoall_base(into, np.full((sum(sends), 2), 7), comes, sends)
        assert (into == 7).all()


@pytest.mark.ranks(2)
async def test_array_without_dimensions_cannot_be_divided_among_ranks(pg: ProcessGroup) -> None:
    point = np.zeros(())
    with pytest.raises(ValueError, match="input has 1 rows, not a multiple of 2 ranks"):
        pg.alltoall_base(np.zeros(2), point)
    with pytest.raises(ValueError, match="output has 0 elements, expected 2, 2 times those of tensor"):
        pg.allgather_into_tensor(np.zeros(0), point)
    assert await pg.alltoall_base(point, np.ones(()), [1, 0], [1, 0]) is point if pg.rank() == 0 else True
    if pg.rank() == 1:
        await pg.alltoall_base(point, np.ones(()), [0, 1], [0, 1])
    assert point == 1


@pytest.mark.ranks(1, 2, 3)
@parametrize_transports(*LINKS)
async def test_single_tensor_calls_on_empty_arrays_work_after_list_calls_on_empty_arrays(pg: ProcessGroup) -> None:
    """Include a group of one rank, where both forms of a call have equal shapes and could share a cached plan."""
    size, empty = pg.size(), np.empty(0)
    for _ in range(2):
        await pg.reduce_scatter(empty.copy(), [empty] * size)
        await pg.allgather([empty.copy() for _ in range(size)], empty)
        await pg.alltoall([empty.copy() for _ in range(size)], [empty] * size)
        assert (await pg.reduce_scatter_tensor(empty.copy(), empty)).size == 0
        assert (await pg.allgather_into_tensor(empty.copy(), empty)).size == 0
        assert (await pg.alltoall_base(empty.copy(), empty)).size == 0
