"""The ops MINLOC and MAXLOC, which find the smallest or largest value and its index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp

from ..ranks import LINKS, parametrize_transports
from ..reductions import DTYPES, numpy_dtype

VALUES = tuple(name for name in DTYPES if not name.startswith("complex"))
INDICES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
OPS = (ReduceOp.MINLOC, ReduceOp.MAXLOC)
FLOAT_INT = np.dtype([("value", "f8"), ("index", "i8")])


def layout(value: str, index: str, number: int) -> np.dtype[Any]:
    """Return a dtype of value-index pairs: packed, aligned, with a gap, or with the index first in memory."""
    v, i = numpy_dtype(value), np.dtype(index)
    wide = max(v.itemsize, i.itemsize)
    offsets = ([0, v.itemsize], [0, wide], [3, 5 + v.itemsize], [i.itemsize, 0])[number % 4]
    size = wide + max(offsets) + (wide if number % 4 == 1 else i.itemsize + v.itemsize)
    size = 2 * wide if number % 4 == 1 else size
    return np.dtype({"names": ["value", "index"], "formats": [v, i], "offsets": offsets, "itemsize": size})


def data(dtype: np.dtype[Any], count: int, rank: int) -> Any:
    """Return value-index pairs with many equal values, and with NaNs if the value dtype is a float."""
    at = np.arange(count)
    x = np.zeros(count, dtype)
    values = (at * 5 + rank * 3 + at // 7 * rank) % 4 - 2.0
    if dtype["value"].name.startswith(("float", "bfloat")):
        values[(at + rank) % 5 == 0] = np.nan
        values[(at * rank) % 7 == 3] *= -0.0
    kind = dtype["value"].name
    x["value"] = (
        (values > 0)
        if kind == "bool"
        else (values % 4 if "uint" in kind else values).astype(np.float32).astype(dtype["value"])
    )
    x["index"] = (at * 11 + rank * 5) % 13
    return x


def located_pairs(op: ReduceOp, inputs: list[Any]) -> Any:
    """Compute the expected pairs one by one, as the documentation defines them."""
    result = inputs[0].copy()
    for place in range(len(result)):
        best = None
        for x in inputs:
            value, index = float(x["value"][place]), int(x["index"][place])
            key = (0, 0.0, index) if np.isnan(value) else (1, value if op == ReduceOp.MINLOC else -value, index)
            if best is None or key < best[0]:
                best = key, x[place]
        assert best is not None
        result[place] = best[1]
    return result


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two arrays of pairs have equal values and indices; NaNs are equal."""
    left, right = (each["value"].astype(np.float64) for each in (a, b))
    return np.array_equal(left, right, equal_nan=True) and np.array_equal(a["index"], b["index"])


async def check(pg: ProcessGroup, dtype: np.dtype[Any], count: int, op: ReduceOp) -> None:
    rank, size, world = pg.rank(), pg.size(), range(pg.size())
    inputs = [data(dtype, count * size, each) for each in world]
    whole = located_pairs(op, inputs)
    part = slice(rank * count, (rank + 1) * count)

    def own_input() -> Any:
        return inputs[rank].copy()

    x = own_input()
    assert await pg.allreduce(x, op) is x
    assert is_equal(x, whole)
    bits = await pg.allgather_object((x["value"].tobytes(), x["index"].tobytes()))
    assert all(each == bits[0] for each in bits)
    root = count % size
    x = await pg.reduce(own_input(), root, op)
    assert is_equal(x, whole if rank == root else inputs[rank])
    assert is_equal(await pg.scan(own_input(), op), located_pairs(op, inputs[: rank + 1]))
    assert is_equal(await pg.exscan(own_input(), op), located_pairs(op, inputs[:rank]) if rank else inputs[0])
    assert is_equal(await pg.reduce_scatter_tensor(np.zeros(count, dtype), own_input(), op), whole[part])
    blocks = [own_input()[each * count : (each + 1) * count] for each in world]
    assert is_equal(await pg.reduce_scatter(np.zeros(count, dtype), blocks, op), whole[part])
    several = [own_input() for _ in range(3)]
    out = np.zeros(count, dtype)
    async with pg.coalescing():
        for each in several:
            pg.allreduce(each, op)
        pg.reduce_scatter_tensor(out, own_input(), op)
    assert all(is_equal(each, whole) for each in several)
    assert is_equal(out, whole[part])


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_minloc_and_maxloc_work_in_every_call(pg: ProcessGroup) -> None:
    for number, count in enumerate((0, 1, 2, 5)):
        for op in OPS:
            await check(pg, FLOAT_INT if number == 2 else layout("float32", "int32", number), count, op)


@pytest.mark.ranks(2, 3)
async def test_minloc_and_maxloc_support_every_value_and_index_dtype(pg: ProcessGroup) -> None:
    for number, value in enumerate(VALUES):
        for op in OPS:
            await check(pg, layout(value, INDICES[number % len(INDICES)], number), 3, op)
    for number, index in enumerate(INDICES):
        await check(pg, layout("float64", index, number), 3, OPS[number % 2])


@parametrize_transports(*LINKS)
@pytest.mark.ranks(2, 3, 4)
async def test_minloc_and_maxloc_of_large_arrays_are_correct(pg: ProcessGroup) -> None:
    """Use arrays that rings and trees split, where the winning rank of each element is known."""
    size, rank = pg.size(), pg.rank()
    for dtype in (FLOAT_INT, layout("float64", "int32", 0)):
        at = np.arange(200_001)
        x = np.zeros(len(at), dtype)
        # At each position, the ranks have the values 0 to size - 1 in rotated order, so that each rank wins somewhere.
        x["value"], x["index"] = (at + rank) % size, rank * 10 + at % 10
        largest = (size - 1 - at) % size
        y = await pg.allreduce(x.copy(), ReduceOp.MAXLOC)
        assert np.array_equal(y["value"], np.full(len(at), size - 1))
        assert np.array_equal(y["index"], largest * 10 + at % 10)
        x["value"] = 1.5
        y = await pg.allreduce(x, ReduceOp.MINLOC)
        assert np.array_equal(y["index"], at % 10)


@pytest.mark.ranks(3)
async def test_nan_with_the_lowest_index_wins_in_minloc_and_maxloc(pg: ProcessGroup) -> None:
    rank = pg.rank()
    for op in OPS:
        x = np.array([(np.nan if rank else -np.inf, 5 - rank), (np.nan, rank), (rank, np.nan == 1)], FLOAT_INT)
        y = await pg.allreduce(x, op)
        assert np.isnan(y["value"][:2]).all()
        assert y["index"].tolist() == [3, 0, 0]
        assert y["value"][2] == (0 if op == ReduceOp.MINLOC else 2)


@pytest.mark.ranks(4)
async def test_minloc_and_maxloc_of_equal_pairs_return_the_same_bits_on_all_ranks(pg: ProcessGroup) -> None:
    """Reduce zeros of both signs, and NaNs with different bits on each rank."""
    for count in (1, 3, 50_000):
        x = np.zeros(count, FLOAT_INT)
        x["value"] = -0.0 if pg.rank() % 2 else 0.0
        y = np.zeros(count, FLOAT_INT)
        y["value"].view("u8")[:] = 0x7FF8000000000000 + pg.rank()
        for each in (x, y):
            for op in OPS:
                bits = await pg.allgather_object((await pg.allreduce(each.copy(), op)).tobytes())
                assert all(other == bits[0] for other in bits)


@pytest.mark.ranks(2)
async def test_minloc_of_an_array_without_value_index_pairs_is_refused(pg: ProcessGroup) -> None:
    for dtype in (
        [("value", "f8"), ("index", "f8")],
        [("value", "c16"), ("index", "i8")],
        [("value", "f8", 2), ("index", "i8")],
        [("value", "f8")],
        [("value", "f8"), ("index", "i8"), ("rank", "i8")],
        [("value", "f8"), ("index", ">i8")],
        [("value", "M8[s]"), ("index", "i8")],
        "V16",
    ):
        x = np.zeros(4, dtype)
        for call in (
            lambda: pg.allreduce(x, ReduceOp.MINLOC),  # noqa: B023
            lambda: pg.reduce_scatter_tensor(x[:2], x, ReduceOp.MAXLOC),  # noqa: B023
        ):
            with pytest.raises(
                TypeError, match=r"op M..LOC accepts pairs of two fields, a real number and an integer, such as"
            ):
                call()
    with pytest.raises(
        TypeError, match=r"op MINLOC is not defined on float64; it accepts arrays of pairs, such as of np"
    ):
        pg.allreduce(np.zeros(3), ReduceOp.MINLOC)
    with pytest.raises(TypeError, match=r"op SUM is not defined on \{value: <f8, index: <i8\}, whose arrays can be"):
        pg.allreduce(np.zeros(3, FLOAT_INT))
    with pytest.raises(TypeError, match="whose arrays can be sent but not reduced"):
        pg.allreduce(np.zeros(3, FLOAT_INT), ReduceOp.custom(np.add, name="MINLOC"))
    with pytest.raises(TypeError, match="op must be a ReduceOp"):
        pg.allreduce(np.zeros(3, FLOAT_INT), "MINLOC")  # type: ignore[arg-type]
    assert await pg.allreduce(1) == 2
