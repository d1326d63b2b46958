"""Broadcast, reduce, allgather and gather of sparse arrays, and averages of sparse arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse

from aiocoll import CollectiveMismatchError, ProcessGroup, ReduceOp

from ..ranks import LINKS, parametrize_transports
from .sparse_ways import every_way

FORMATS = ("coo_array", "coo_matrix", "csr_array", "csr_matrix", "csc_array", "csc_matrix")
SHAPE = (12, 7)


def dense(rank: int, dtype: str = "float64", shape: tuple[int, int] = SHAPE) -> Any:
    """Return dense values with entries in the first row, which all ranks share, and in a row of this rank."""
    x = np.zeros(shape, dtype)
    x[0] = rank + 1
    x[1 + rank % (shape[0] - 1), 2:] = 10
    return x


def rank_array(rank: int, form: str = "csr_array", dtype: str = "float64") -> Any:
    return getattr(scipy.sparse, form)(dense(rank, dtype))


def check(array: Any, form: str, right: Any) -> None:
    assert type(array).__name__ == form
    assert array.dtype == right.dtype
    assert array.shape == right.shape
    assert array.has_canonical_format
    assert np.array_equal(array.toarray(), right)
    assert array.data.size == np.count_nonzero(right)


@every_way
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_sparse_arrays_work_in_broadcast_reduce_allreduce_allgather_and_gather(
    pg: ProcessGroup, way: str
) -> None:
    rank, size = pg.rank(), pg.size()
    world = range(size)
    for number, form in enumerate(FORMATS):
        root = number % size
        x = rank_array(rank, form, "float32")
        assert await pg.broadcast(x, root) is x
        check(x, form, dense(root, "float32"))
        total = sum(dense(each) for each in world)
        for op, right in ((ReduceOp.SUM, total), (ReduceOp.AVG, total / size)):
            x = rank_array(rank, form)
            assert await pg.reduce(x, root, op) is x
            check(x, form, right if rank == root else dense(rank))
            x = rank_array(rank, form)
            assert await pg.allreduce(x, op) is x
            check(x, form, right)
        x = rank_array(rank, form, "int64")
        for each, array in enumerate(await pg.allgather(None, x)):
            check(array, form, dense(each, "int64"))
        gathered = await pg.gather(None, x, root)
        if rank != root:
            assert gathered is None
            continue
        for each, array in enumerate(gathered):
            check(array, form, dense(each, "int64"))


@parametrize_transports(*LINKS)
@pytest.mark.ranks(2, 4)
async def test_gathered_sparse_arrays_can_differ_in_rows_and_be_empty(pg: ProcessGroup) -> None:
    """Gather blocks with different numbers of rows, and stack them into one array."""
    rank, size = pg.rank(), pg.size()
    x = scipy.sparse.random_array((rank * 100, 50), density=0.3, format="csr", rng=np.random.default_rng(rank))
    parts = await pg.allgather(None, x)
    whole = scipy.sparse.vstack(parts)
    assert whole.shape == (50 * size * (size - 1), 50)
    start = 50 * rank * (rank - 1)
    assert (whole[start : start + rank * 100] != x).nnz == 0
    parts = await pg.gather(None, x, size - 1)
    assert rank < size - 1 or [part.shape for part in parts] == [(each * 100, 50) for each in range(size)]
    empty = scipy.sparse.coo_array((3, 3))
    if rank:
        empty = scipy.sparse.coo_array(np.eye(3))
    await pg.broadcast(empty, 0)
    assert empty.nnz == 0
    big = scipy.sparse.random_array((2000, 2000), density=0.05, format="coo", rng=np.random.default_rng(rank))
    await pg.broadcast(big, 1)
    right = scipy.sparse.random_array((2000, 2000), density=0.05, format="coo", rng=np.random.default_rng(1))
    assert (big != right).nnz == 0


@every_way
@pytest.mark.ranks(3)
async def test_sparse_averages_support_every_dtype(pg: ProcessGroup, way: str) -> None:
    for dtype in ("int8", "int64", "uint16", "float32", "float64", "complex64"):
        values = np.array([[-5 if dtype[0] != "u" else 5, 0, 4]], dtype) * (pg.rank() == 1)
        x = scipy.sparse.coo_array(values.astype(dtype))
        await pg.allreduce(x, ReduceOp.AVG)
        right = values * 0 + np.array([[-5 if dtype[0] != "u" else 5, 0, 4]], dtype)
        divided = np.trunc(right / 3) if "int" in dtype else right.real / right.real.dtype.type(3)
        assert np.array_equal(x.toarray(), divided.astype(dtype))
    with pytest.raises(TypeError, match="op AVG is not defined on bool"):
        pg.allreduce(scipy.sparse.coo_array(np.eye(2) > 0), ReduceOp.AVG)


@every_way
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.ranks(3)
async def test_sparse_torch_tensors_work_in_calls_that_move_data(pg: ProcessGroup, way: str) -> None:
    torch = pytest.importorskip("torch")
    rank = pg.rank()

    def tensor(each: int, layout: str, dtype: Any) -> Any:
        x = torch.zeros(4, 3, dtype=dtype)
        x[each], x[3, 0] = each + 1, 2
        return x.to_sparse_csr() if layout == "csr" else x.to_sparse(1) if layout == "hybrid" else x.to_sparse()

    for layout in ("coo", "csr", "hybrid"):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            if layout == "csr" and dtype != torch.float32:
                continue
            parts = [tensor(each, layout, dtype).to_dense() for each in range(3)]
            x = await pg.broadcast(tensor(rank, layout, dtype), 1)
            assert torch.equal(x.to_dense(), parts[1])
            x = await pg.reduce(tensor(rank, layout, dtype), 2)
            assert torch.equal(x.to_dense(), parts[0] + parts[1] + parts[2] if rank == 2 else parts[rank])
            x = await pg.allreduce(tensor(rank, layout, torch.float32), ReduceOp.AVG)
            assert torch.equal(x.to_dense(), sum(each.float() for each in parts) / 3)
            for each, x in enumerate(await pg.allgather(None, tensor(rank, layout, dtype))):
                assert (x.layout, x.dtype) == (tensor(0, layout, dtype).layout, dtype)
                assert torch.equal(x.to_dense(), parts[each])
            gathered = await pg.gather(None, tensor(rank, layout, dtype), 0)
            assert rank or all(torch.equal(x.to_dense(), parts[each]) for each, x in enumerate(gathered))


@pytest.mark.parametrize("call", ["broadcast", "reduce", "allgather", "gather"])
@pytest.mark.ranks(2)
async def test_mismatched_calls_that_move_sparse_arrays_raise_an_error(pg: ProcessGroup, call: str) -> None:
    other = dense(1, "float32")
    x = rank_array(0) if pg.rank() == 0 else scipy.sparse.csr_array(other)
    with pytest.raises(CollectiveMismatchError, match="differ in the following: dtype") as caught:
        await (
            pg.allgather(None, x)
            if call == "allgather"
            else pg.gather(None, x, 0)
            if call == "gather"
            else getattr(pg, call)(x, 0)
        )
    text = str(caught.value)
    assert f"{call.upper()}_SPARSE(" in text
    assert "dtype=float64" in text
    assert "dtype=float32" in text


@pytest.mark.ranks(2)
async def test_coalesced_and_keyed_calls_that_move_sparse_arrays_work_or_are_refused(pg: ProcessGroup) -> None:
    rank = pg.rank()
    x, y = rank_array(rank), rank_array(rank)
    async with pg.coalescing():
        pg.broadcast(x, 0)
        work = pg.allgather(None, y)
    assert np.array_equal(x.toarray(), dense(0))
    assert [np.array_equal(part.toarray(), dense(each)) for each, part in enumerate(work.result())] == [True, True]
    await pg.broadcast(x, 1, key="x")
    with pytest.raises(TypeError, match="outputs must be None for sparse arrays"):
        pg.allgather([x, y], x)
    with pytest.raises(ValueError, match=r"op=ReduceOp.MAX is not defined on sparse arrays, since"):
        pg.reduce(x, 0, ReduceOp.MAX)
    for call in (lambda: pg.scan(x), lambda: pg.alltoall([x, x], [y, y]), lambda: pg.scatter(x, None, 0)):
        with pytest.raises(TypeError, match="must be a dense array, not a csr_array"):
            call()
    with pytest.raises(TypeError, match=r"tensor must be .*, not list"):
        pg.broadcast([1], 0)
