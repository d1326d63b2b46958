"""Collectives on lists with one array per rank, and on one array divided among the ranks; cached plans of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.work import Work

from ..ranks import parametrize_transports
from .views import recorded_views

#: Shapes of the array for one rank. An array for all ranks has `world_size` times as many rows.
SHAPES = [(1,), (3,), (1000,), (2, 5)]
DTYPES = ["f4", "f8", "i8", np.dtype("q"), np.dtype("l")]  # the last two have one width, but may be different types
#: The arrays that a rank sends and receives: each a single array, or a list with one array per rank.
Arrays = tuple[Any, Any]
#: A function that starts a collective on `Arrays`, with a root that only some collectives use.
Call = Callable[..., Work[Any]]


def value(first: int, src: int, dst: int) -> int:
    """Return the value of all elements that rank `src` sends to rank `dst`."""
    return first + 10 * src + dst


def allgather(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.allgather(got, given, **options)


def gather(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.gather(got, given, root, **options)


def scatter(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.scatter(got, given, root, **options)


def reduce_scatter(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.reduce_scatter(got, given, **options)


def alltoall(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.alltoall(got, given, **options)


def allgather_into_tensor(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.allgather_into_tensor(got, given, **options)


def reduce_scatter_tensor(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.reduce_scatter_tensor(got, given, **options)


def alltoall_base(pg: ProcessGroup, given: Any, got: Any, root: int, **options: Any) -> Work[Any]:
    return pg.alltoall_base(got, given, **options)


LISTS = [allgather, gather, scatter, reduce_scatter, alltoall]
IN_PARTS = [allgather_into_tensor, reduce_scatter_tensor, alltoall_base]
CALLS = [*LISTS, *IN_PARTS]
#: Collectives in which every rank contributes one array for each rank, and those that return one array from each rank.
GIVEN_TO_ALL = (scatter, reduce_scatter, reduce_scatter_tensor)
GOT_FROM_ALL = (allgather, gather, allgather_into_tensor)


def arrays(
    call: Call, pg: ProcessGroup, shape: tuple[int, ...], dtype: Any, first: int, root: int = 0, grow: int = 0
) -> Arrays:
    """Return the arrays to send and to receive; those from rank r to s have `grow` * (r + s) additional rows.

    In an allgather and a gather, s counts as 0; in a scatter and a reduce_scatter, r counts as 0.
    """
    size, rank = pg.size(), pg.rank()

    def array(src: int, dst: int, fill: int) -> Any:
        rows = shape[0] + grow * ((0 if call in GIVEN_TO_ALL else src) + (0 if call in GOT_FROM_ALL else dst))
        return np.full((rows, *shape[1:]), fill, dtype)

    given: Any = [array(rank, peer, value(first, rank, peer)) for peer in range(size)]
    got: Any = [array(peer, rank, -1) for peer in range(size)]
    if call in IN_PARTS:
        given, got = np.concatenate(given), np.concatenate(got)
    if call in GOT_FROM_ALL:
        given = array(rank, 0, value(first, rank, 0))
    if call in GIVEN_TO_ALL:
        got = array(0, rank, -1)
    if call is gather and rank != root:
        got = None
    if call is scatter and rank != root:
        given = None
    return given, got


def check(call: Call, pg: ProcessGroup, got: Any, first: int, root: int = 0) -> None:
    size, rank = pg.size(), pg.rank()
    if call in (reduce_scatter, reduce_scatter_tensor):
        assert (got == sum(value(first, src, rank) for src in range(size))).all()
    elif call is scatter:
        assert (got == value(first, root, rank)).all()
    elif got is not None:
        for src, each in enumerate(np.split(got, size) if call in IN_PARTS else got):
            assert (each == value(first, src, 0 if call in GOT_FROM_ALL else rank)).all()


def changed_arrays(change: Callable[[Any], Any], given: Any) -> Any:
    """Apply `change` to an array or to each array of a list."""
    if given is None:
        return None
    return [change(array) for array in given] if isinstance(given, list) else change(given)


def strided(array: Any) -> Any:
    """Return a noncontiguous copy of an array."""
    other = np.zeros((*array.shape, 2), array.dtype)[..., 0]
    other[:] = array
    return other


def frozen(array: Any) -> Any:
    """Make an array read-only, and return it."""
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
@parametrize_transports("shm", "memory")
async def test_repeated_call_returns_correct_results(call: Call, pg: ProcessGroup) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            for first in range(3):
                root = first % pg.size()
                given, got = arrays(call, pg, shape, dtype, first, root)
                result = await call(pg, given, got, root)
                check(call, pg, got, first, root)
                # The results must be the output arrays that the caller passed.
                same = [result], [got]
                if isinstance(got, list):
                    same = result, got
                assert [id(each) for each in same[0]] == [id(each) for each in same[1]]


@pytest.mark.parametrize("call", LISTS)
@pytest.mark.ranks(2, 3, 4)
@parametrize_transports("shm", "memory")
async def test_arrays_of_list_collectives_can_have_different_lengths(call: Call, pg: ProcessGroup) -> None:
    for grow in (1, 2, 40_000):
        for first in range(2):
            for root in range(pg.size()):
                given, got = arrays(call, pg, (1,), "f4", first, root, grow)
                await call(pg, given, got, root)
                check(call, pg, got, first, root)


@pytest.mark.ranks(1)
@parametrize_transports("memory")
async def test_arrays_without_dimensions_can_be_exchanged_in_a_group_of_one_rank(pg: ProcessGroup) -> None:
    for value in (1.0, 2.0):
        for shapes in (((), ()), ((), (1,)), ((1,), ())):
            whole, other = (np.full(shape, value + part) for part, shape in enumerate(shapes))
            await pg.alltoall_base(other, whole)
            assert other.reshape(1)[0] == value


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(1)
@parametrize_transports("memory")
async def test_repeated_call_uses_its_cached_plan_without_examining_arrays(call: Call, pg: ProcessGroup) -> None:
    await call(pg, *arrays(call, pg, (4,), "f4", 0), 0)
    given, got = arrays(call, pg, (4,), "f4", 1)
    with recorded_views() as viewed:
        await call(pg, given, got, 0)
        assert viewed == []
        await call(pg, changed_arrays(strided, given), got, 0)
        assert len(viewed) > 1
    check(call, pg, got, 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(3)
@parametrize_transports("memory")
async def test_calls_with_keys_blocks_tuples_and_empty_arrays_return_correct_results(
    call: Call, pg: ProcessGroup
) -> None:
    for first in range(2):
        given, got = arrays(call, pg, (4,), "f4", first, 1)
        await call(pg, given, got, 1, key="a")
        check(call, pg, got, first, 1)
        both = [arrays(call, pg, (4,), "f4", first + part, 1) for part in range(2)]
        async with pg.coalescing():
            works = [call(pg, given, got, 1) for given, got in both]
        for part, (work, (_, got)) in enumerate(zip(works, both, strict=True)):
            await work
            check(call, pg, got, first + part, 1)
        given, got = arrays(call, pg, (4,), "f4", first, 1)
        result = await call(pg, *(tuple(each) if isinstance(each, list) else each for each in (given, got)), 1)
        check(call, pg, got, first, 1)
        assert isinstance(result, list) == isinstance(got, list)
        await call(pg, *arrays(call, pg, (0,), "f4", first, 1), 1)
        if call in LISTS:
            given, got = arrays(call, pg, (0,), "f4", first, 1, 1)  # rank 0 has no elements
            await call(pg, given, got, 1)
            check(call, pg, got, first, 1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(3)
@parametrize_transports("memory")
async def test_call_on_an_unusual_array_after_a_plain_array_returns_the_correct_result(
    call: Call, pg: ProcessGroup
) -> None:
    """Use strided and read-only arrays whose shape and dtype equal those of an earlier call."""
    for first, change in enumerate((lambda array: array, strided, lambda array: array)):
        given, got = arrays(call, pg, (4,), "i4", first)
        given, got = changed_arrays(change, given), changed_arrays(change, got)
        await call(pg, given, got, 0)
        check(call, pg, got, first)
    given, got = arrays(call, pg, (4,), "i4", 3)
    await call(pg, changed_arrays(frozen, given), got, 0)
    check(call, pg, got, 3)


@pytest.mark.parametrize("call", LISTS)
@pytest.mark.ranks(2, 4)
@parametrize_transports("memory")
async def test_wrong_list_is_refused_after_a_valid_call_with_the_same_shapes(call: Call, pg: ProcessGroup) -> None:
    size, rank = pg.size(), pg.rank()
    other = (rank + 1) % size
    given, got = arrays(call, pg, (4,), "f4", 0, rank, 0)
    for root in range(size):
        await call(pg, *arrays(call, pg, (4,), "f4", 0, root, 0), root)

    def own(arrays: Any) -> Any:
        """Return this rank's array from a list, or the array itself."""
        return arrays[rank] if isinstance(arrays, list) else arrays

    def with_replaced(arrays: Any, place: int, array: Any) -> Any:
        if not isinstance(arrays, list):
            return array
        return [array if each == place else arrays[each] for each in range(size)]

    with pytest.raises(ValueError, match="elements"):
        call(pg, given, with_replaced(got, rank, np.zeros(3, "f4")), rank)
    with pytest.raises(TypeError, match="dtype"):
        call(pg, with_replaced(given, rank, own(given).astype("f8")), got, rank)
    with pytest.raises((TypeError, ValueError)):
        call(pg, given, "text", rank)
    blocks = got if isinstance(got, list) else given
    for wrong in ([], blocks[1:], [*blocks, blocks[0]], np.zeros(5, "f4"), dict(enumerate(blocks))):
        with pytest.raises((TypeError, ValueError)):
            call(pg, *((given, wrong) if isinstance(got, list) else (wrong, got)), rank)
    # Pass this rank's array a second time, in place of another rank's array.
    if isinstance(got, list):
        across = given, with_replaced(got, other, own(given))
    else:
        across = with_replaced(given, other, own(got)), got
    if call is not reduce_scatter:
        with pytest.raises(ValueError, match=r"shares? memory"):
            call(pg, *across, rank)
    if isinstance(got, list):
        with pytest.raises(ValueError, match="share memory"):
            call(pg, given, with_replaced(got, other, got[rank]), rank)
    own(got).flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(pg, given, got, rank)
    given, got = arrays(call, pg, (4,), "f4", 1, 0, 0)
    await call(pg, given, got, 0)
    check(call, pg, got, 1, 0)


@pytest.mark.parametrize("call", IN_PARTS)
@pytest.mark.ranks(2)
@parametrize_transports("memory")
async def test_wrong_array_is_refused_after_a_valid_call_with_the_same_shape(call: Call, pg: ProcessGroup) -> None:
    given, got = arrays(call, pg, (4,), "f4", 0)
    await call(pg, given, got, 0)
    whole, other = (got, given) if call is allgather_into_tensor else (given, got)

    def wrong(whole: Any, other: Any) -> None:
        call(pg, *((other, whole) if call is allgather_into_tensor else (whole, other)), 0)

    with pytest.raises(ValueError, match=r"elements|split"):
        wrong(np.zeros(7, "f4"), other)
    with pytest.raises(ValueError, match="elements"):
        wrong(whole, other[:-2].copy())
    with pytest.raises(TypeError, match="dtype"):
        wrong(whole, other.astype("f8"))
    if call is alltoall_base:
        with pytest.raises(ValueError, match="shares memory"):
            wrong(whole, whole)
    elif call is allgather_into_tensor:
        with pytest.raises(ValueError, match="shares memory"):
            wrong(whole, np.split(whole, 2)[1 - pg.rank()])
    got.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        wrong(whole, other)
    given, got = arrays(call, pg, (4,), "f4", 1)
    await call(pg, given, got, 0)
    check(call, pg, got, 1)


@pytest.mark.parametrize("call", [gather, scatter])
@pytest.mark.ranks(2)
@parametrize_transports("memory")
async def test_only_the_root_of_gather_and_scatter_can_pass_a_list(call: Call, pg: ProcessGroup) -> None:
    root = 1 - pg.rank()
    mine, lists = np.zeros(4, "f4"), [np.zeros(4, "f4") for _ in range(2)]
    for _ in range(2):
        with pytest.raises(ValueError, match="only the root"):
            call(pg, *((mine, lists) if call is gather else (lists, mine)), root)
        with pytest.raises(ValueError, match="root"):
            call(pg, *((mine, None) if call is gather else (None, mine)), 2)
        given, got = arrays(call, pg, (4,), "f4", 5, 1, 0)
        # On the other ranks, an empty list has the same meaning as None.
        await call(pg, [] if given is None else given, [] if got is None else got, 1)
        check(call, pg, got, 5, 1)
        result = await pg.gather(None, np.full(4, pg.rank(), "f4"), 0)
        assert result is None if pg.rank() else [each.tolist() for each in result] == [[0.0] * 4, [1.0] * 4]


@pytest.mark.ranks(3)
@parametrize_transports("memory")
async def test_inputs_and_outputs_that_overlap_as_documented_are_accepted(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    for first in range(2):
        for call in (allgather, gather):
            given, got = arrays(call, pg, (4,), "f4", first, rank, 0)
            got[rank][:] = given
            got = got if call is allgather or not rank else None
            await call(pg, given if got is None else got[rank], got, 0)
            check(call, pg, got, first, 0)
        given, got = arrays(scatter, pg, (4,), "f4", first, 0, 0)
        got = got if given is None else given[0]
        await pg.scatter(got, given, 0)
        check(scatter, pg, got, first, 0)
        for place in range(size):
            given, _ = arrays(reduce_scatter, pg, (4,), "f4", first, 0, 0)
            await pg.reduce_scatter(given[place], given)
            check(reduce_scatter, pg, given[place], first, 0)
        same = np.full(4, value(first, rank, 0), "f4")
        got = [np.zeros(4, "f4") for _ in range(size)]
        await pg.alltoall(got, [same] * size)
        assert [each.tolist() for each in got] == [[value(first, src, 0)] * 4 for src in range(size)]
        _, got = arrays(allgather_into_tensor, pg, (4,), "f4", first)
        mine = np.split(got, size)[rank]
        mine[:] = value(first, rank, 0)
        await pg.allgather_into_tensor(got, mine)
        check(allgather_into_tensor, pg, got, first)
        given, _ = arrays(reduce_scatter_tensor, pg, (4,), "f4", first)
        mine = np.split(given, size)[rank]
        await pg.reduce_scatter_tensor(mine, given)
        check(reduce_scatter_tensor, pg, mine, first)


@pytest.mark.parametrize("call", [reduce_scatter, reduce_scatter_tensor])
@pytest.mark.ranks(2)
@parametrize_transports("memory")
async def test_plans_are_cached_separately_for_each_op(call: Call, pg: ProcessGroup) -> None:
    rank = pg.rank()
    for op, expected in ((ReduceOp.SUM, 10.0), (ReduceOp.MAX, 10.0), (ReduceOp.AVG, 5.0), (ReduceOp.MIN, 0.0)) * 2:
        given, got = arrays(call, pg, (4,), "f4", 0)
        await call(pg, given, got, 0, op=op)
        assert (got == expected + rank * (2 if op == ReduceOp.SUM else 1)).all()
    given, got = arrays(call, pg, (4,), "f8", 0)
    with pytest.raises(TypeError):
        call(pg, given, got, 0, op=ReduceOp.BAND)
