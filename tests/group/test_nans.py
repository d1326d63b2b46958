"""NaNs in reductions: the result has the same bits on every rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.elements.dtypes import by_name, from_numpy
from aiocoll.elements.kernels import builtin_kernel
from aiocoll.elements.nan_fingerprint import nan_fingerprint
from aiocoll.elements.ops import kernel
from aiocoll.engine.job.ids import hash62

from ..each import each
from ..internals import comm_of, dispatcher_of
from ..nans import COUNTS, cases, inputs, is_right, reduce_op
from ..ranks import parametrize_transports

Call = Callable[[ProcessGroup, list[np.ndarray], Any], Awaitable[list[np.ndarray]]]


async def reduced_separately(pg: ProcessGroup, arrays: list[np.ndarray], op: Any) -> list[np.ndarray]:
    return [await work for work in [pg.allreduce(x, op) for x in arrays]]


async def reduced_with_keys(pg: ProcessGroup, arrays: list[np.ndarray], op: Any) -> list[np.ndarray]:
    return [await work for work in [pg.allreduce(x, op, key=f"{len(x)}") for x in arrays]]


async def reduced_in_a_block(pg: ProcessGroup, arrays: list[np.ndarray], op: Any) -> list[np.ndarray]:
    async with pg.coalescing():
        works = [pg.allreduce(x, op) for x in arrays]
    return [work.result() for work in works]


async def reduced_as_a_list(pg: ProcessGroup, arrays: list[np.ndarray], op: Any) -> list[np.ndarray]:
    return await pg.allreduce_coalesced(arrays, op)


@pytest.mark.parametrize("call", [reduced_separately, reduced_with_keys, reduced_in_a_block, reduced_as_a_list])
@pytest.mark.ranks(2, 3, 4, 7, timeout=60)
@parametrize_transports("memory", "shm", "tcp")
async def test_nan_bits_are_equal_on_all_ranks(pg: ProcessGroup, call: Call) -> None:
    """Check also that reductions ignore the caller's `np.errstate` settings."""
    found: list[bytes] = []
    for op, dtype in cases()[:: 1 if pg.size() < 4 else 3]:
        given = [inputs(dtype, count, pg.size()) for count in (COUNTS if call is reduced_separately else COUNTS[:4])]
        with np.errstate(all="raise"):
            results = await call(pg, [arrays[pg.rank()].copy() for arrays in given], reduce_op(op))
        for arrays, result in zip(given, results, strict=True):
            assert is_right(op, arrays, result), (op, dtype, len(result))
        found.append(b"".join(result.tobytes() for result in results))
    digests = [hash62(bits.hex()) for bits in found]
    assert await pg.allgather_object(digests) == [digests] * pg.size()


@pytest.mark.ranks(2, 3, 4, 7)
@parametrize_transports("memory", "shm")
async def test_nan_bits_of_scalars_are_equal_on_all_ranks(pg: ProcessGroup) -> None:
    bits = []
    for dtype in ("float32", "float64", "complex64", "complex128"):
        for seed in range(6):
            number = inputs(dtype, 1, pg.size(), seed)[pg.rank()][0]
            bits += [np.array(await pg.allreduce(given)).tobytes() for given in (number, number.item())]
    assert await pg.allgather_object(bits) == [bits] * pg.size()


@each(("op", "dtype"), cases())
def test_fold_result_does_not_depend_on_which_input_is_also_the_output(op: str, dtype: str) -> None:
    """Fold into each input in turn, because each rank reduces into its own input."""
    for size in (2, 3, 4):
        for count in COUNTS[:6]:
            found = set()
            for rank in range(size):
                arrays = inputs(dtype, count, size)
                element = from_numpy(arrays[0].dtype)
                made = kernel(reduce_op(op), element, size)
                stored = [array.view(element.storage) for array in arrays]
                with np.errstate(all="ignore"):
                    made.fold(stored, stored[rank])
                found.add(stored[rank].tobytes())
            assert len(found) == 1 or not made.portable, (size, count)


@pytest.mark.ranks(3, 4)
@parametrize_transports("memory", "shm")
async def test_each_element_is_reduced_on_one_rank_if_the_ranks_produce_different_nans(pg: ProcessGroup) -> None:
    """Simulate ranks whose arithmetic produces different NaNs."""
    comm = comm_of(pg)
    assert comm.makes_same_nans
    comm.makes_same_nans = False
    dispatcher_of(pg).plans.known.clear()
    found = []
    for op, dtype in cases():
        arrays = [inputs(dtype, count, pg.size())[pg.rank()].copy() for count in (1, 3, 131)]
        found += [x.tobytes() for x in await reduced_separately(pg, arrays, reduce_op(op))]
    assert await pg.allgather_object(found) == [found] * pg.size()
    algorithms = {row.algorithm for row in pg.stats().operations if row.op == "ALLREDUCE"}
    assert not algorithms & {"exchange", "oneround", "bruck", "oneshot", "central"}, algorithms
    assert await pg.allreduce(np.ones(3, int)) is not None  # integers are reduced on every rank


def test_nan_fingerprint_depends_on_the_numpy_loops_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nan_fingerprint() == nan_fingerprint.__wrapped__()
    assert 0 < nan_fingerprint() < 2**56
    assert builtin_kernel("SUM", by_name("float64"), 2, None).nan_varies
    assert not builtin_kernel("SUM", by_name("int64"), 2, None).nan_varies

    def other(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.add(b, a)

    monkeypatch.setattr("aiocoll.elements.nan_fingerprint._CASES", (((other,), (np.nan, -np.nan), (3,)),))
    swapped = nan_fingerprint.__wrapped__()
    monkeypatch.setattr("aiocoll.elements.nan_fingerprint._CASES", (((np.add,), (np.nan, -np.nan), (3,)),))
    assert swapped != nan_fingerprint.__wrapped__()
