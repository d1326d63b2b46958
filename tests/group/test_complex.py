"""Complex arrays and numbers in every call, and the ops that refuse them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.group.messages import Recv, Send

from ..ranks import LINKS, parametrize_transports, run_ranks

DTYPES = ("complex64", "complex128")
SIZES = (1, 2, 3, 4, 7)


def data(rank: int, count: int, dtype: str, block: int = 0) -> Any:
    """Return complex numbers with small integer parts, so that sums and products are exact."""
    i = np.arange(count) + block
    return ((i % 5 + rank) + 1j * (rank - i % 3)).astype(dtype)


def is_equal(got: Any, right: Any) -> bool:
    return bool(got.dtype == right.dtype and np.array_equal(got, right))


async def check_reductions(pg: ProcessGroup, count: int, dtype: str) -> None:
    rank, size = pg.rank(), pg.size()
    inputs = [data(each, count, dtype) for each in range(size)]
    mine = inputs[rank]
    total = np.sum(inputs, axis=0, dtype=dtype)
    parts = total.view(total.real.dtype)
    mean = (parts / parts.dtype.type(size)).view(dtype)  # NumPy's complex division rounds differently
    turns = [np.full(count, (1, 1j, -2, -1j)[each % 4], dtype) for each in range(size)]
    assert is_equal(await pg.allreduce(mine.copy()), total)
    assert is_equal(await pg.allreduce(mine.copy(), ReduceOp.AVG), mean)
    assert is_equal(await pg.allreduce(turns[rank].copy(), ReduceOp.PRODUCT), np.prod(turns, axis=0, dtype=dtype))
    factors = [np.dtype(dtype).type((2j, 0.5, -1)[each % 3]) for each in range(size)]
    scaled = np.sum([f * x for f, x in zip(factors, inputs, strict=True)], axis=0, dtype=dtype)
    assert is_equal(await pg.allreduce(mine.copy(), ReduceOp.PREMUL_SUM(factors[rank])), scaled)
    below = np.sum(inputs[: rank + 1], axis=0, dtype=dtype)
    assert is_equal(await pg.scan(mine.copy()), below)
    assert is_equal(await pg.exscan(mine.copy()), below - mine if rank else mine)
    for root in {0, size - 1}:
        assert is_equal(await pg.reduce(mine.copy(), root), total if rank == root else mine)
    assert is_equal(await pg.allreduce(mine.copy(), ReduceOp.custom(np.add)), total)
    blocks = [data(rank, count + block, dtype, block) for block in range(size)]
    right = np.sum([data(each, count + rank, dtype, rank) for each in range(size)], axis=0, dtype=dtype)
    assert is_equal(await pg.reduce_scatter(np.empty(count + rank, dtype), blocks), right)
    whole = np.concatenate([data(rank, count, dtype, block) for block in range(size)])
    right = np.sum([data(each, count, dtype, rank) for each in range(size)], axis=0, dtype=dtype)
    assert is_equal(await pg.reduce_scatter_tensor(np.empty(count, dtype), whole), right)


async def check_movements(pg: ProcessGroup, count: int, dtype: str) -> None:
    rank, world = pg.rank(), range(pg.size())
    last = world[-1]
    mine = data(rank, count + rank, dtype)
    by_rank = [data(each, count + each, dtype) for each in world]

    def blank(length: int) -> Any:
        return np.zeros(length, dtype)

    assert is_equal(await pg.broadcast(data(rank, count, dtype), last), data(last, count, dtype))
    gathered = await pg.allgather([blank(len(each)) for each in by_rank], mine)
    assert all(map(is_equal, gathered, by_rank))
    into = await pg.allgather_into_tensor(blank(count * len(world)), data(rank, count, dtype))
    assert is_equal(into, np.concatenate([data(each, count, dtype) for each in world]))
    gathered = await pg.gather([blank(len(each)) for each in by_rank] if rank == last else None, mine, last)
    assert gathered is None if rank != last else all(map(is_equal, gathered, by_rank))
    scattered = await pg.scatter(blank(count + rank), by_rank if rank == last else None, last)
    assert is_equal(scattered, by_rank[rank])
    # The values and the lengths depend on the sender and the receiver.
    sent = [data(rank * 10 + to, count + rank + to, dtype) for to in world]
    come = [data(by * 10 + rank, count + rank + by, dtype) for by in world]
    assert all(map(is_equal, await pg.alltoall([blank(len(each)) for each in come], sent), come))
    lengths = [len(each) for each in come], [len(each) for each in sent]
    assert is_equal(
        await pg.alltoall_base(blank(sum(lengths[0])), np.concatenate(sent), *lengths), np.concatenate(come)
    )


async def check_messages(pg: ProcessGroup, count: int, dtype: str) -> None:
    rank, size = pg.rank(), pg.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    right = data(before, count, dtype)
    if size > 1:
        got = np.zeros(count, dtype)
        sending = pg.send(data(rank, count, dtype), after)
        assert is_equal(await pg.recv(got, before), right)
        await sending
        sending = pg.send(data(rank, count, dtype), after, 5)
        work = pg.recv_anysource(got := np.zeros(count, dtype), 5)
        assert is_equal(await work, right)
        assert work.source_rank() == before
        await sending
        await pg.batch([Send(data(rank, count, dtype), after), Recv(got := np.zeros(count, dtype), before)])
        assert is_equal(got, right)
    objects = await pg.allgather_object({"a": data(rank, min(count, 9), dtype), "b": 1 + rank * 1j})
    assert all(is_equal(each["a"], data(by, min(count, 9), dtype)) for by, each in enumerate(objects))
    assert [each["b"] for each in objects] == [1 + by * 1j for by in range(size)]
    own = await pg.empty(count, dtype)
    own[:] = 1 + 1j
    assert is_equal(await pg.allreduce(own), np.full(count, size * (1 + 1j), dtype))


async def check_all_calls(pg: ProcessGroup, counts: tuple[int, ...], dtype: str) -> None:
    for count in counts:
        await check_reductions(pg, count, dtype)
        await check_movements(pg, count, dtype)
        await check_messages(pg, count, dtype)


@pytest.mark.parametrize(("dtype", "size", "transport"), [
    *((dtype, size, "memory") for dtype, size in product(DTYPES, SIZES)),
    *((dtype, 3, transport) for dtype, transport in product(DTYPES, LINKS[1:])),
])  # fmt: skip
async def test_complex_numbers_work_in_every_call(dtype: str, size: int, transport: str) -> None:
    await run_ranks(size, check_all_calls, (1, 1000, 40_000), dtype, transport=transport)


@pytest.mark.matrix
@pytest.mark.ranks(*SIZES)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_complex_numbers_work_in_every_call_at_every_world_size(pg: ProcessGroup, dtype: str) -> None:
    await check_all_calls(pg, (0, 1, pg.size() + 1, 300_000), dtype)


@pytest.mark.ranks(3)
async def test_complex_scalars_keep_their_python_type(pg: ProcessGroup) -> None:
    got = await pg.allreduce(1 + pg.rank() * 1j)
    assert (type(got), got) == (complex, 3 + 3j)
    narrow = await pg.allreduce(np.complex64(1j))
    assert (type(narrow), narrow) == (np.complex64, 3j)


@pytest.mark.ranks(3)
async def test_nan_in_one_part_of_a_complex_number_does_not_spread_to_the_other_part(pg: ProcessGroup) -> None:
    tensor = np.array([complex(np.nan, 1) if pg.rank() else 1j, 1], "complex64")
    await pg.allreduce(tensor)
    assert np.isnan(tensor[0].real)
    assert tensor[0].imag == 3
    assert tensor[1] == 3


CALLS: dict[str, Callable[[ProcessGroup, Any, ReduceOp], object]] = {
    "allreduce": lambda pg, x, op: pg.allreduce(x, op),
    "reduce": lambda pg, x, op: pg.reduce(x, 0, op),
    "scan": lambda pg, x, op: pg.scan(x, op),
    "exscan": lambda pg, x, op: pg.exscan(x, op),
    "reduce_scatter": lambda pg, x, op: pg.reduce_scatter(x[:1], [x[1:2], x[2:3]], op),
    "reduce_scatter_tensor": lambda pg, x, op: pg.reduce_scatter_tensor(x[:1], x[1:3], op),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", CALLS)
async def test_ordering_and_bitwise_ops_on_complex_numbers_are_refused(pg: ProcessGroup, kind: str) -> None:
    for name, dtype in product(("MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"), DTYPES):
        tensor = np.full(4, 1j, dtype)
        with pytest.raises(TypeError, match=f"op {name} is not defined on {dtype}; it accepts"):
            CALLS[kind](pg, tensor, getattr(ReduceOp, name))
        assert (tensor == 1j).all()
    with pytest.raises(TypeError, match="op MAX is not defined on complex128"):
        pg.allreduce(1j, ReduceOp.MAX)
    with pytest.raises(TypeError, match="the factor 2j is complex, but the array is float32"):
        CALLS[kind](pg, np.ones(4, np.float32), ReduceOp.PREMUL_SUM(2j))
    work = pg.barrier()
    assert work.seq == 1  # the refused calls have not taken a number
    await work
