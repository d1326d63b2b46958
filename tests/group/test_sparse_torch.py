"""Allreduce of torch's sparse tensors; these tests are skipped without torch."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.errors import CollectiveMismatchError

from .sparse_ways import every_way

torch = pytest.importorskip("torch", reason="torch is not installed: sparse tensors of torch are not tested")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]


@pytest.fixture(autouse=True)
def check_invariants() -> Any:
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


def rank_array(rank: int, size: int, sparse_dims: int, dense_dims: int, dtype: Any = None) -> Any:
    """Return a sparse tensor with ones at the indices 0 to `rank` of its first dimension."""
    indices = torch.zeros((sparse_dims, rank + 1), dtype=torch.int64)
    indices[0] = torch.arange(rank + 1)
    values = torch.ones([rank + 1] + [2] * dense_dims, dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, [size] * sparse_dims + [2] * dense_dims)


async def check(pg: ProcessGroup, sparse_dims: int, dense_dims: int, dtype: Any = None) -> None:
    size = pg.size()
    tensor = rank_array(pg.rank(), size, sparse_dims, dense_dims, dtype)
    work = pg.allreduce(tensor)
    assert (work.op, work.seq) == ("ALLREDUCE_SPARSE", 1)
    assert await work is tensor
    assert tensor.layout is torch.sparse_coo
    assert tensor.is_coalesced()
    assert (tensor.sparse_dim(), tensor.dense_dim()) == (sparse_dims, dense_dims)
    assert tuple(tensor.shape) == (size,) * sparse_dims + (2,) * dense_dims
    expected = torch.zeros((sparse_dims, size), dtype=torch.int64)
    expected[0] = torch.arange(size)
    assert torch.equal(tensor.indices(), expected)
    # Index i has a one from rank i and from each higher rank.
    for place, values in enumerate(tensor.values()):
        right = torch.full([2] * dense_dims, size - place).to(tensor.dtype)
        assert torch.equal(values, right), f"{values} at {place}"


@pytest.mark.parametrize(("sparse_dims", "dense_dims"), [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3), (2, 1)])
@pytest.mark.ranks(1, 2, 4)
async def test_sparse_torch_allreduce_supports_dense_dimensions(
    pg: ProcessGroup, sparse_dims: int, dense_dims: int, way: str
) -> None:
    await check(pg, sparse_dims, dense_dims)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16",
                                   "float32", "float64", "complex64", "complex128"])  # fmt: skip
@pytest.mark.parametrize("dense_dims", [0, 1])
@pytest.mark.ranks(3)
async def test_sparse_torch_allreduce_supports_every_dtype(
    pg: ProcessGroup, dtype: str, dense_dims: int, way: str
) -> None:
    await check(pg, 1, dense_dims, getattr(torch, dtype))


@every_way
@pytest.mark.ranks(2)
async def test_sparse_torch_allreduce_sums_duplicate_entries(pg: ProcessGroup, way: str) -> None:
    tensor = torch.sparse_coo_tensor([[3, 1, 3]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], (4, 2))
    await pg.allreduce(tensor)
    assert tensor.indices().tolist() == [[1, 3]]
    assert tensor.values().tolist() == [[6.0, 8.0], [12.0, 16.0]]


@pytest.mark.ranks(2)
async def test_sparse_torch_allreduce_supports_empty_tensors(pg: ProcessGroup, way: str) -> None:
    for shape, sparse_dims in (((3, 2), 1), ((0, 4), 2), ((3, 0), 1), ((), 0), ((2,), 0)):
        values = torch.empty((0, *shape[sparse_dims:]))
        tensor = torch.sparse_coo_tensor(torch.empty((sparse_dims, 0), dtype=torch.int64), values, shape)
        assert await pg.allreduce(tensor) is tensor
        assert tensor._nnz() == 0
        assert tuple(tensor.shape) == shape
    # Include a tensor whose entries have no elements, and a tensor without sparse dimensions.
    hollow = torch.sparse_coo_tensor([[pg.rank()]], torch.empty((1, 0)), (3, 0))
    await pg.allreduce(hollow)
    assert hollow.indices().tolist() == [[0, 1]]
    single = torch.sparse_coo_tensor(torch.empty((0, 1), dtype=torch.int64), torch.tensor([[1.0, 2.0]]), (2,))
    await pg.allreduce(single)
    assert single.to_dense().tolist() == [2.0, 4.0]


@pytest.mark.ranks(2)
async def test_sparse_torch_allreduce_writes_its_result_into_a_tensor_that_requires_grad(
    pg: ProcessGroup, way: str
) -> None:
    tensor = rank_array(pg.rank(), 2, 1, 1).requires_grad_()
    assert await pg.allreduce(tensor) is tensor
    assert tensor.requires_grad
    assert tensor.is_leaf
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, pg.rank() + 2, 1])).sum().backward()
    gradient = table.weight.grad
    assert not gradient.is_coalesced()
    await pg.allreduce(gradient)
    assert table.weight.grad is gradient
    assert gradient.to_dense().tolist() == [[0, 0], [4, 4], [1, 1], [1, 1], [0, 0]]


@pytest.mark.ranks(2)
async def test_sparse_torch_allreduce_supports_lazy_conjugates_and_strided_values(pg: ProcessGroup, way: str) -> None:
    values = torch.tensor([[1 + 2j, 5], [3 - 1j, 6]])[:, :1]
    tensor = torch.sparse_coo_tensor([[0, 2]], values.conj(), (3, 1))
    await pg.allreduce(tensor)
    assert tensor.to_dense().tolist() == [[2 - 4j], [0], [6 + 2j]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
async def test_sparse_torch_allreduce_of_a_csr_tensor_returns_a_new_tensor(
    pg: ProcessGroup, dtype: str, way: str
) -> None:
    dense = torch.zeros(3, 4, dtype=getattr(torch, dtype))
    dense[0, 1] = 1
    dense[pg.rank() + 1, 3] = 2
    tensor = dense.to_sparse_csr()
    result = await pg.allreduce(tensor)
    assert torch.equal(tensor.to_dense(), dense)
    assert result.layout is torch.sparse_csr
    assert result.to_dense().tolist() == [[0, 2, 0, 0], [0, 0, 0, 2], [0, 0, 0, 2]]


@pytest.mark.ranks(2)
async def test_sparse_torch_tensor_on_one_rank_matches_a_scipy_array_on_another(pg: ProcessGroup, way: str) -> None:
    dense = np.diag([1.0, 2.0, 0.0])
    mine = scipy.sparse.csr_array(dense) if pg.rank() else torch.from_numpy(dense).to_sparse()
    result = await pg.allreduce(mine)
    values = result.toarray() if pg.rank() else result.to_dense().numpy()
    assert np.array_equal(values, dense * 2)


@pytest.mark.ranks(2)
async def test_sparse_torch_tensors_of_different_dimensions_are_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    tensor = torch.eye(3).to_sparse(1 + pg.rank())
    with pytest.raises(CollectiveMismatchError, match="SUM over 1 sparse and 1 dense dimensions"):
        await pg.allreduce(tensor)


@pytest.mark.ranks(2)
async def test_unsupported_sparse_torch_tensor_is_refused(pg: ProcessGroup) -> None:
    tensor = torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match=r"op=ReduceOp.MAX is not defined on sparse arrays, since"):
        pg.allreduce(tensor, ReduceOp.MAX)
    for other in (torch.eye(4).to_sparse_csc(), torch.eye(4).to_sparse_bsr((2, 2))):
        with pytest.raises(TypeError, match=r"layout torch.sparse_\w+; pass tensor.to_sparse\(\)"):
            pg.allreduce(other)
    with pytest.raises(TypeError, match="only 2 are supported"):
        pg.allreduce(torch.eye(4).expand(2, 4, 4).to_sparse_csr())
    with pytest.raises(TypeError, match=r"must be a dense tensor on the CPU or on CUDA, not torch.sparse_coo"):
        pg.scan(tensor)
    work = pg.allreduce(tensor)
    assert work.seq == 1
    await work


@pytest.mark.ranks(2)
async def test_event_loop_runs_during_a_large_sparse_torch_call(pg: ProcessGroup) -> None:
    """Use a tensor so large that worker threads read, add and write its entries."""
    count = 300_000
    generator = torch.Generator().manual_seed(pg.rank())
    indices = torch.randint(0, 50_000_000, (1, count), generator=generator)
    tensor = torch.sparse_coo_tensor(indices, torch.ones(count), (50_000_000,))
    work = pg.allreduce(tensor)
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    await work
    assert tensor.values().sum() == 2 * count
    assert turns > 10
