"""Cartesian grids of ranks: coordinates, neighbours and halo exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiocoll import (
    PROC_NULL,
    CartesianGroup,
    CollectiveMismatchError,
    GroupClosedError,
    GroupError,
    GroupOptions,
    ProcessGroup,
    Recv,
    Send,
    new_group,
    testing,
)
from aiocoll.group.grid import Grid, balanced

from ..ranks import LINKS, parametrize_transports, wait_until


def grid_of(pg: ProcessGroup, dims: Sequence[int], periods: Any = None) -> CartesianGroup[ProcessGroup]:
    """Return the Cartesian group that contains this rank; fail if the rank is outside of the grid."""
    cart = pg.cart(dims, periods)
    assert cart is not None
    return cart


def test_grid_lengths_are_as_equal_as_possible() -> None:
    cases: list[tuple[int, list[int], tuple[int, ...]]] = [
        (1, [0, 0], (1, 1)),
        (6, [0], (6,)),
        (6, [0, 0], (3, 2)),
        (6, [0, 0, 0], (3, 2, 1)),
        (7, [0, 0], (7, 1)),
        (7, [0, 0, 0], (7, 1, 1)),
        (8, [0, 0, 0], (2, 2, 2)),
        (12, [0, 2, 0], (3, 2, 2)),
        (12, [0, 0], (4, 3)),
        (16, [0, 0, 0], (4, 2, 2)),
        (24, [0, 0, 0], (4, 3, 2)),
        (36, [0, 0, 0], (4, 3, 3)),
        (1024, [0, 0, 0], (16, 8, 8)),
        (6, [2, 3], (2, 3)),
        (6, [2, 2], (2, 2)),
    ]
    for size, dims, expected in cases:
        assert balanced(size, dims) == expected
    # Compare with all other grids of the same number of ranks: none has more nearly equal lengths.
    for size in range(1, 61):
        for count in (2, 3):
            found = balanced(size, [0] * count)
            divisors = [each for each in range(1, size + 1) if size % each == 0]
            every = [each for each in product(divisors, repeat=count) if prod(each) == size]
            assert found == min(tuple(sorted(each, reverse=True)) for each in every)
    with pytest.raises(ValueError, match=r"dims=\[4, 0\]: the 6 ranks of the group are not a multiple of 4"):
        balanced(6, [4, 0])


def test_grid_coordinates_are_in_row_major_order() -> None:
    for dims in ([5], [2, 3], [3, 2, 2], [1, 4, 1]):
        grid = Grid(dims, [False] * len(dims))
        for rank in range(grid.size):
            coords = tuple(map(int, np.unravel_index(rank, dims)))
            assert grid.coords(rank) == coords
            assert grid.rank_at(coords) == rank
        ring = Grid(dims, [True] * len(dims))
        for coords in product(*(range(-2 * length, 2 * length) for length in dims)):
            assert ring.rank_at(coords) == np.ravel_multi_index(coords, dims, mode="wrap")
            outside = any(not 0 <= each < length for each, length in zip(coords, dims, strict=True))
            assert (grid.rank_at(coords) == PROC_NULL) == outside


@pytest.mark.ranks(1, 2, 3, 4, 6, 7)
async def test_grid_returns_coordinates_and_neighbours_of_each_rank(pg: ProcessGroup) -> None:
    size = pg.size()
    for dims, periods in (([0], [True]), ([0, 0], [True, False]), ([0, 1, 0], None), ([size], False), ([0, 0], True)):
        cart = grid_of(pg, dims, periods)
        assert prod(cart.dims) == size
        assert cart.group.global_ranks == tuple(range(size))
        shape, here = cart.dims, cart.coords()
        assert here == np.unravel_index(pg.rank(), shape)
        assert [cart.coords(rank) for rank in range(size)] == list(product(*map(range, shape)))
        neighbours = []
        for axis, length in enumerate(shape):
            for distance in (1, -1, 2, 0):
                expected = []
                for step in (-distance, distance):
                    coord = here[axis] + step
                    place = [*here[:axis], coord % length, *here[axis + 1 :]]
                    inside = cart.periods[axis] or 0 <= coord < length
                    expected.append(int(np.ravel_multi_index(place, shape)) if inside else PROC_NULL)
                assert cart.shift(axis, distance) == cart.shift(axis - len(shape), distance) == tuple(expected)
            neighbours += cart.shift(axis)
        assert cart.neighbours == tuple(neighbours)
        # Send this rank's number to the destination; the number from the source must arrive.
        for axis in range(len(shape)):
            source, destination = cart.shift(axis)
            got = np.full(1, PROC_NULL)
            await cart.group.batch([Send(np.array([pg.rank()]), destination), Recv(got, source)])
            assert got[0] == source


@pytest.mark.ranks(7)
async def test_ranks_outside_the_grid_receive_none(pg: ProcessGroup) -> None:
    cart = pg.cart([2, 3])
    assert (cart is None) == (pg.rank() == 6)
    if cart is not None:
        assert await cart.group.allreduce(1) == 6
        assert cart.group.group_name == "world:0/0.0"
        assert repr(cart).startswith(
            "<CartesianGroup dims=[2, 3] periods=[False, False] of <ProcessGroup 'world:0/0.0'"
        )
    assert await pg.allreduce(1) == 7


@pytest.mark.ranks(6)
async def test_subgrids_contain_the_rows_or_columns_of_the_grid(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [3, 2], [True, False])
    row, column = cart.coords()
    rows, columns, both, one = cart.sub(1), cart.sub([0]), cart.sub([1, 0]), grid_of(pg, [1, 6]).sub(0)
    assert (rows.dims, rows.periods, rows.coords()) == ((2,), (False,), (column,))
    assert (columns.dims, columns.periods, columns.coords()) == ((3,), (True,), (row,))
    assert (both.dims, both.coords(), one.dims, one.coords()) == ((3, 2), (row, column), (1,), (0,))
    assert await rows.group.allgather_object((row, column)) == [(row, each) for each in range(2)]
    assert await columns.group.allgather_object((row, column)) == [(each, column) for each in range(3)]
    assert columns.shift(0) == ((row - 1) % 3, (row + 1) % 3)
    names = await pg.allgather_object(rows.group.group_name)
    assert len(set(names)) == 3
    for axes in ([], [0, 0], [0, -2]):
        with pytest.raises(ValueError, match="must name at least one axis, and each axis once"):
            cart.sub(axes)
    with pytest.raises(ValueError, match="axis=2 is out of range: the grid has 2 axes"):
        cart.sub(2)


# -- halos


def halo_arrays(cart: CartesianGroup[Any], own: Sequence[int], widths: Sequence[int], dtype: Any) -> tuple[Any, Any]:
    """Return this rank's array before a halo exchange, and the expected array after it."""
    dims, count = cart.dims, len(cart.dims)
    total = [length * cells for length, cells in zip(dims, own, strict=False)] + list(own[count:])
    whole = (np.arange(prod(total)) % 97 + 1).reshape(total)
    shape = [cells + 2 * width for cells, width in zip(own, widths, strict=True)]
    expected = np.zeros(shape, int)
    for index in product(*map(range, shape)):
        place = []
        for axis, at in enumerate(index):
            offset = cart.coords()[axis] * own[axis] if axis < count else 0
            at = offset + at - widths[axis]
            periodic = axis < count and cart.periods[axis]
            place.append(at % total[axis] if periodic else at)
        if all(0 <= at < length for at, length in zip(place, total, strict=True)):
            expected[index] = whole[tuple(place)]
    before = np.zeros(shape, int)
    inner = tuple(slice(width, width + cells) for width, cells in zip(widths, own, strict=True))
    before[inner] = expected[inner]
    return before.astype(dtype), expected.astype(dtype)


def grids(size: int) -> Iterator[tuple[list[int], list[bool]]]:
    for dims in ([0], [0, 0], [1, 0], [0, 0, 0]):
        for periodic in (False, True):
            yield dims, [periodic] * len(dims)
    yield [0, 0], [True, False]


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 6, 7)
async def test_halo_copies_the_cells_of_the_neighbours(pg: ProcessGroup) -> None:
    """Include corner cells, and periodic grids where both neighbours are the same rank, or this rank itself."""
    for dims, periods in grids(pg.size()):
        cart = grid_of(pg, dims, periods)
        for width in (1, 2):
            own = [2 + axis for axis in range(len(dims))]
            before, expected = halo_arrays(cart, own, [width] * len(dims), "float64")
            work = cart.halo(before, width)
            assert await work is before
            np.testing.assert_array_equal(before, expected)
    assert pg.pending() == []


@pytest.mark.ranks(4)
async def test_halo_supports_every_dtype_layout_and_width(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [2, 2], True)
    for dtype in (
        "bool",
        "int8",
        "uint64",
        "float16",
        "float32",
        "complex64",
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
    ):
        before, expected = halo_arrays(cart, [3, 2, 2], [1, 1, 0], dtype)  # the third axis holds two values per cell
        await cart.halo(before)
        np.testing.assert_array_equal(before, expected)
    for widths in ([2, 1], [0, 1], [1, 0], [0, 0], [3, 3]):
        before, expected = halo_arrays(cart, [4, 3], widths, "int32")
        layouts = [
            before.copy(),
            np.asfortranarray(before),
            np.repeat(before, 2, axis=1)[:, ::2],
            before[::-1].copy()[::-1],
        ]
        for array in layouts:
            assert await cart.halo(array, widths) is array
            np.testing.assert_array_equal(array, expected)


@pytest.mark.torch
@pytest.mark.ranks(4)
async def test_halo_supports_torch_tensors(pg: ProcessGroup) -> None:
    torch = pytest.importorskip("torch")
    cart = grid_of(pg, [2, 2], [True, False])
    before, expected = halo_arrays(cart, [4, 3], [2, 1], "int32")
    for tensor in (torch.tensor(before), torch.tensor(before).to(torch.bfloat16), torch.tensor(before.T.copy()).T):
        assert await cart.halo(tensor, (2, 1)) is tensor
        np.testing.assert_array_equal(tensor.to(torch.int32).numpy(), expected)


@pytest.mark.ranks(4)
@parametrize_transports("memory", "unix", "shm")
async def test_large_halos_complete_concurrently(pg: ProcessGroup) -> None:
    """Check that halo exchanges start at the call, progress without an await, and may end in any order."""
    cart = grid_of(pg, [2, 2], [True, False])
    # Each face has more than 300 KiB, which exceeds the eager window, so that the receiver must grant it.
    arrays = []
    for number in range(3):
        array = np.zeros((6, 8, 20_000), "float32")
        array[1:-1, 1:-1] = 10 * pg.rank() + number
        arrays.append(array)
    works = [cart.halo(array) for array in arrays]
    assert pg.pending() == []
    assert [work for work in cart.group.pending() if work.op == "HALO"] == works
    await cart.group.drain()
    assert all(work.done() for work in works)
    row, column = cart.coords()
    for number, array in enumerate(arrays):
        for at, neighbour_row in ((0, 1 - row), (3, row), (-1, 1 - row)):
            for place, neighbour in ((0, column - 1), (4, column), (-1, column + 1)):
                rank = cart.rank_at((neighbour_row, neighbour))
                expected = 0 if rank == PROC_NULL else 10 * rank + number
                assert (array[at, place] == expected).all()


@pytest.mark.ranks(4)
async def test_concurrent_halos_that_overtake_each_other_do_not_mix_data(pg: ProcessGroup) -> None:
    """Let a short halo exchange overtake a long one on the ranks of column 0, but not on those of column 1."""
    cart = grid_of(pg, [2, 2], True)
    row, column = cart.coords()
    long, short = np.zeros((3, 500_000)), np.zeros((3, 3))
    long[1, 1:-1], short[1, 1] = 10 + pg.rank(), 20 + pg.rank()
    first = cart.halo(long)
    if column:
        await wait_until(lambda: long[0, -2] and long[2, -2])  # the first axis of the long halo is complete
    await cart.halo(short)
    await first
    for array, base in ((long, 10), (short, 20)):
        for at, its_row in ((0, 1 - row), (1, row), (2, 1 - row)):
            for place, its_column in ((0, 1 - column), (1, column), (-2, column), (-1, 1 - column)):
                assert array[at, place] == base + cart.rank_at((its_row, its_column))


@pytest.mark.ranks(2)
async def test_halo_messages_do_not_match_receives_of_the_program(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [2], True)
    other = 1 - pg.rank()
    theirs = np.zeros(1)
    receiving = cart.group.recv(theirs, other)
    array = np.array([0.0, pg.rank() + 1, 0.0])
    await cart.halo(array)
    assert array.tolist() == [other + 1, pg.rank() + 1, other + 1]
    assert not receiving.done()
    await cart.group.send(np.full(1, 9.0), other)
    assert (await receiving)[0] == 9


@pytest.mark.ranks(2)
async def test_halo_faces_of_different_sizes_raise_a_mismatch_error(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [2, 1], True)
    with pytest.raises(
        CollectiveMismatchError, match=r"counts.*rank 0 called .*counts=\[4\].*rank 1 called .*counts=\[5\]"
    ):
        await cart.halo(np.zeros((3, 4 + pg.rank())))
    with pytest.raises(GroupError):
        cart.halo(np.zeros((3, 4)))
    assert await pg.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_abort_of_the_group_fails_a_pending_halo(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [2])
    work = cart.halo(np.zeros(3)) if pg.rank() else None
    await pg.barrier()
    if pg.rank() == 0:
        cart.group.abort("enough")
    else:
        assert work is not None
        with pytest.raises(GroupError, match="enough"):
            await work
        assert cart.group.pending() == []


@pytest.mark.ranks(2)
async def test_wrong_grid_or_halo_arguments_are_refused_and_start_no_exchange(pg: ProcessGroup) -> None:
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: pg.cart([3]), ValueError, r"dims=\[3\] needs 3 ranks, but the group has 2"),
        (lambda: pg.cart([3, 0]), ValueError, "are not a multiple of 3"),
        (lambda: pg.cart([]), ValueError, "must have at least one axis"),
        (lambda: pg.cart([-1, 2]), ValueError, "no negative length"),
        (lambda: pg.cart(2), TypeError, "dims must be a list of ints, not int"),
        (lambda: pg.cart([1.5]), TypeError, r"dims\[0\] must be an int, not float"),
        (lambda: pg.cart([2], [True, False]), ValueError, "must be a bool, or 1 of them"),
        (lambda: pg.cart([2], ["yes"]), ValueError, "must be a bool, or 1 of them"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    cart = grid_of(pg, [2, 1])  # the refused calls have not taken a number
    assert cart.group.group_name == "world:0/0.0"
    read_only = np.zeros((3, 3))
    read_only.flags.writeable = False
    calls = [
        (lambda: cart.coords(2), ValueError, "rank=2 is not a rank"),
        (lambda: cart.coords(PROC_NULL), ValueError, "rank is PROC_NULL"),
        (lambda: cart.rank_at([0]), ValueError, "must be 2 ints"),
        (lambda: cart.rank_at(0), TypeError, "coords must be a list of ints"),
        (lambda: cart.shift(2), ValueError, "axis=2 is out of range: the grid has 2 axes"),
        (lambda: cart.shift("a"), TypeError, "axis must be an int"),
        (lambda: cart.shift(0, 1.0), TypeError, "displacement"),
        (lambda: cart.halo([[0.0] * 3] * 3), TypeError, "slices share its memory, not list"),
        (lambda: cart.halo(memoryview(bytearray(9))), TypeError, "slices share its memory, not memoryview"),
        (lambda: cart.halo(np.zeros(9)), ValueError, "array has 1 axes, but needs at least the 2 axes of the grid"),
        (lambda: cart.halo(np.zeros((3, 2))), ValueError, "array has 2 cells on axis 1, but needs at least 3"),
        (lambda: cart.halo(np.zeros((3, 5)), 2), ValueError, "array has 3 cells on axis 0, but needs at least 6"),
        (lambda: cart.halo(read_only), ValueError, "array is read-only"),
        (lambda: cart.halo(np.zeros((3, 3), object)), TypeError, "array: dtype"),
        (lambda: cart.halo(np.zeros((3, 3)), [1]), ValueError, "width"),
        (lambda: cart.halo(np.zeros((3, 3)), -1), ValueError, "width=-1 must be an int >= 0"),
        (lambda: cart.halo(np.zeros((3, 3)), 1.0), TypeError, "width"),
        (lambda: cart.halo(np.zeros((3, 3)), timeout=-1), ValueError, "timeout=-1"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert cart.group.pending() == []
    async with cart.group.coalescing():
        with pytest.raises(RuntimeError, match="coalescing block cannot record"):
            cart.halo(np.zeros((3, 3)))
    array = np.full((3, 1 + 2), float(pg.rank()))
    await cart.halo(array)
    assert array[:, 1].tolist() == [[0, 0, 1], [0, 1, 1]][pg.rank()]
    await cart.group.shutdown()
    with pytest.raises(GroupClosedError):
        cart.halo(array)


@pytest.mark.ranks(2)
async def test_halo_can_be_estimated(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [2, 1], True)
    array = np.zeros((4, 5))
    with cart.group.time_estimator() as estimate:
        assert await cart.halo(array) is array
    assert sorted(call.op for call in estimate.calls) == ["RECV", "RECV", "SEND", "SEND"]
    assert [call.nbytes for call in estimate.calls] == [40] * 4


async def test_halo_exchange_succeeds_with_debug_detail_and_in_a_dry_run() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        cart = grid_of(pg, [2], True)
        array = np.array([0, pg.rank() + 1, 0])
        await cart.halo(array)
        return array.tolist()

    assert await testing.run_ranks(2, rank, options=GroupOptions(debug="detail")) == [[2, 1, 2], [1, 2, 1]]
    async with new_group("fake", rank=1, world_size=64) as pg:
        cart = grid_of(pg, [0, 0, 0], True)
        assert (cart.dims, cart.neighbours) == ((4, 4, 4), (49, 17, 13, 5, 0, 2))
        array = np.zeros((3, 3, 3))
        assert await cart.halo(array) is array


@pytest.mark.ranks(2)
async def test_close_of_the_group_fails_pending_halos(pg: ProcessGroup) -> None:
    cart = grid_of(pg, [2, 1])
    if pg.rank() == 0:
        work = cart.halo(np.zeros((3, 3)))
        cart.group.timeout = 0.02
        await cart.group.shutdown()
        assert isinstance(work.exception(), GroupClosedError)
    await pg.barrier()
