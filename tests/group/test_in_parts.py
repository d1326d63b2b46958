"""Collectives on equal parts of one array: results of repeated calls, whose plans are cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.work import Work

from ..internals import observe_calls
from ..ranks import parametrize_transports

#: Shapes of a part. The first axis of the whole array is longer by the number of ranks.
SHAPES = [(1,), (3,), (1000,), (2, 5)]
DTYPES = ["f4", "f8", "i8", np.dtype("q"), np.dtype("l")]  # the last two have one width, but may be different types
#: A function that starts a call on two arrays. The first one has the parts of all ranks.
Call = Callable[..., Work[Any]]


def allgather(pg: ProcessGroup, whole: Any, other: Any, **options: Any) -> Work[Any]:
    return pg.allgather_into_tensor(whole, other, **options)


def reduce_scatter(pg: ProcessGroup, whole: Any, other: Any, **options: Any) -> Work[Any]:
    return pg.reduce_scatter_tensor(other, whole, **options)


def alltoall(pg: ProcessGroup, whole: Any, other: Any, **options: Any) -> Work[Any]:
    return pg.alltoall_base(other, whole, **options)


CALLS = [allgather, reduce_scatter, alltoall]


def record_views(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets an entry for each array that calls examine without a cached plan."""
    viewed: list[Any] = []
    spy = lambda *args, **_: viewed.append(args)  # noqa: E731
    observe_calls(patch, collective_view=spy, argument_view=spy)
    return viewed


def arrays(call: Call, pg: ProcessGroup, shape: tuple[int, ...], dtype: Any, first: int) -> tuple[Any, Any]:
    """Return the arrays of this rank's call, the whole one first; part p of rank r has the value first + p + 10 r."""
    size, rank = pg.size(), pg.rank()
    whole = np.zeros((size * shape[0], *shape[1:]), dtype)
    if call is allgather:
        return whole, np.full(shape, first + 10 * rank, dtype)
    for part, each_part in enumerate(np.split(whole, size)):
        each_part[:] = first + part + 10 * rank
    return whole, np.zeros(whole.shape if call is alltoall else shape, dtype)


def check(call: Call, pg: ProcessGroup, whole: Any, other: Any, first: int) -> None:
    size, rank = pg.size(), pg.rank()
    if call is reduce_scatter:
        assert (other == size * (first + rank) + 10 * (size * (size - 1) // 2)).all()
        return
    for sender, part in enumerate(np.split(whole if call is allgather else other, size)):
        assert (part == first + 10 * sender + (rank if call is alltoall else 0)).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
@parametrize_transports("shm", "memory")
async def test_repeated_call_gives_the_right_results(call: Call, pg: ProcessGroup) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            for first in range(3):
                whole, other = arrays(call, pg, shape, dtype, first)
                result = await call(pg, whole, other)
                check(call, pg, whole, other, first)
                assert result is (whole if call is allgather else other)


@pytest.mark.ranks(1)
@parametrize_transports("memory")
async def test_arrays_without_axes_are_divided(pg: ProcessGroup) -> None:
    for value in (1.0, 2.0):
        for shapes in (((), ()), ((), (1,)), ((1,), ())):
            whole, other = (np.full(shape, value + part) for part, shape in enumerate(shapes))
            await pg.alltoall_base(other, whole)
            assert other.reshape(1)[0] == value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(1)
@parametrize_transports("memory")
async def test_repeated_call_makes_no_views(call: Call, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    await call(pg, *arrays(call, pg, (4,), "f4", 0))
    viewed = record_views(monkeypatch)
    whole, other = arrays(call, pg, (4,), "f4", 1)
    await call(pg, whole, other)
    check(call, pg, whole, other, 1)
    assert viewed == []
    await call(pg, np.stack([whole, whole], 1)[:, 0], other)
    assert len(viewed) > 1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(3)
@parametrize_transports("memory")
async def test_keyed_coalesced_and_empty_calls_are_right(call: Call, pg: ProcessGroup) -> None:
    for first in range(2):
        whole, other = arrays(call, pg, (4,), "f4", first)
        await call(pg, whole, other, key="a")
        check(call, pg, whole, other, first)
        both = [arrays(call, pg, (4,), "f4", first + part) for part in range(2)]
        async with pg.coalescing():
            for whole, other in both:
                call(pg, whole, other)
        for part, (whole, other) in enumerate(both):
            check(call, pg, whole, other, first + part)
        await call(pg, *arrays(call, pg, (0,), "f4", first))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(3)
@parametrize_transports("memory")
async def test_call_on_an_unusual_array_is_right_after_a_plain_one(call: Call, pg: ProcessGroup) -> None:
    """Use strided and read-only arrays with the shape and dtype of an earlier call."""
    whole, other = arrays(call, pg, (4,), "i4", 0)
    await call(pg, whole, other)
    whole, other = arrays(call, pg, (4,), "i4", 1)
    strided = [np.zeros((*array.shape, 2), "i4")[..., 0] for array in (whole, other)]
    strided[0][:], strided[1][:] = whole, other
    await call(pg, *strided)
    check(call, pg, *strided, 1)
    whole, other = arrays(call, pg, (4,), "i4", 2)
    (other if call is allgather else whole).flags.writeable = False
    await call(pg, whole, other)
    check(call, pg, whole, other, 2)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(2)
@parametrize_transports("memory")
async def test_wrong_array_is_refused_after_a_right_one(call: Call, pg: ProcessGroup) -> None:
    whole, other = arrays(call, pg, (4,), "f4", 0)
    await call(pg, whole, other)
    with pytest.raises(ValueError, match=r"elements|split"):
        call(pg, np.zeros(7, "f4"), other)
    with pytest.raises(ValueError, match="elements"):
        call(pg, whole, other[:-2].copy())
    with pytest.raises(TypeError, match="dtype"):
        call(pg, whole, other.astype("f8"))
    if call is alltoall:
        with pytest.raises(ValueError, match="shares memory"):
            call(pg, whole, whole)
    elif call is allgather:
        with pytest.raises(ValueError, match="shares memory"):
            call(pg, whole, np.split(whole, 2)[1 - pg.rank()])
    target = whole if call is allgather else other
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(pg, whole, other)
    whole, other = arrays(call, pg, (4,), "f4", 1)
    await call(pg, whole, other)
    check(call, pg, whole, other, 1)


@pytest.mark.ranks(3)
@parametrize_transports("memory")
async def test_allowed_overlaps_are_accepted(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    for first in range(2):
        whole, other = arrays(allgather, pg, (4,), "f4", first)
        mine = np.split(whole, size)[rank]
        mine[:] = other
        await pg.allgather_into_tensor(whole, mine)
        check(allgather, pg, whole, mine, first)
        whole, _ = arrays(reduce_scatter, pg, (4,), "f4", first)
        into = np.split(whole, size)[rank]
        await pg.reduce_scatter_tensor(into, whole)
        check(reduce_scatter, pg, whole, into, first)


@pytest.mark.ranks(2)
@parametrize_transports("memory")
async def test_plan_is_cached_per_op(pg: ProcessGroup) -> None:
    for op, expected in ((ReduceOp.SUM, 10.0), (ReduceOp.MAX, 10.0), (ReduceOp.AVG, 5.0), (ReduceOp.MIN, 0.0)) * 2:
        whole, other = arrays(reduce_scatter, pg, (4,), "f4", 0)
        await pg.reduce_scatter_tensor(other, whole, op)
        rank = pg.rank()
        assert (other == expected + rank * (2 if op == ReduceOp.SUM else 1)).all()
    with pytest.raises(TypeError):
        pg.reduce_scatter_tensor(np.zeros(2), np.zeros(4), ReduceOp.BAND)
