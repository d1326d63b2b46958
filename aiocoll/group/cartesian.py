"""Groups whose ranks form a grid: coordinates, neighbours, subgrids, and ghost-cell exchange."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Generic, Self, TypeVar

from aiocoll.group.dispatch.dispatcher import Timeout
from aiocoll.group.grid import Grid, balanced, ints
from aiocoll.group.halo import TAGS, Axis, check_array, exchange
from aiocoll.group.parts import parts_of
from aiocoll.typing import Array
from aiocoll.work import Work

__all__ = ["CartesianGroup", "make_cartesian"]

A = TypeVar("A", bound=Array)
G = TypeVar("G")


class CartesianGroup(Generic[G]):
    """A grid of ranks, made by `ProcessGroup.cart`. Each rank has its own object.

    Ranks of `group` are in row-major order: the last coordinate changes fastest. Message tags from 2**29 are reserved
    for `halo`.

    Attributes:
        group: the `ProcessGroup` of the ranks of the grid, for all other calls. It is closed separately, or with the
            group that it was made from.
        dims: number of ranks along each axis.
        periods: whether each axis is periodic: its last rank is a neighbour of its first.
    """

    def __init__(self, group: G, grid: Grid) -> None:
        self.group = group
        self.dims = grid.dims
        self.periods = grid.periods
        self._grid = grid
        parts = parts_of(group)
        self._dispatcher, self._messages = parts.dispatcher, parts.messages
        self._rank = self._dispatcher.rank
        self._exchanges = 0

    def __repr__(self) -> str:
        return f"<CartesianGroup dims={list(self.dims)} periods={list(self.periods)} of {self.group!r}>"

    def coords(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the coordinates of a rank in the grid.

        Args:
            rank: a rank of `group`; None is this rank.

        Returns:
            One coordinate per axis, from 0.

        Raises:
            TypeError, ValueError: `rank` is not a rank of the group.
        """
        return self._grid.coords(self._rank if rank is None else self._dispatcher.check_rank(rank, "rank"))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at the given coordinates of the grid.

        Args:
            coords: one coordinate per axis; it wraps around on a periodic axis.

        Returns:
            The rank in `group`; `PROC_NULL` outside the grid.

        Raises:
            TypeError, ValueError: `coords` is not a list of one int per axis.
        """
        place = ints(coords, "coords")
        if len(place) != len(self.dims):
            raise ValueError(f"coords={place} must be {len(self.dims)} ints, one per axis")
        return self._grid.rank_at(place)

    def shift(self, axis: int, displacement: int = 1) -> tuple[int, int]:
        """Return the ranks to receive from and to send to, when data is shifted along an axis.

        Args:
            axis: axis of the grid; -1 is the last.
            displacement: distance of the shift, towards higher coordinates.

        Returns:
            Source and destination; `PROC_NULL` for a rank beyond the end of the grid.

        Raises:
            TypeError, ValueError: an argument is not an int, or there is no such axis.
        """
        (distance,) = ints([displacement], "displacement")
        return self._grid.shift(self._rank, self._grid.axis(axis), distance)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The neighbours below and above this rank on each axis; `PROC_NULL` beyond the end of the grid."""
        return tuple(rank for axis in range(len(self.dims)) for rank in self._grid.shift(self._rank, axis, 1))

    def sub(self, axes: int | Sequence[int]) -> Self:
        """Make subgrids along the given axes, such as the rows or the columns of this grid.

        All ranks of the grid call it, in the same order as other calls that make groups from `group`.

        Args:
            axes: one axis or several axes of the new grid, in any order; they keep the order of this grid.

        Returns:
            The subgrid this rank is in.

        Raises:
            TypeError, ValueError: `axes` is empty, names an axis twice, or names an axis that does not exist.
            GroupError: the group is closed or has failed.

        Cost: nothing is sent.
        """
        given: list[Any] = list(axes) if hasattr(axes, "__iter__") else [axes]
        kept = sorted({self._grid.axis(axis) for axis in given})
        if not kept or len(kept) < len(given):
            raise ValueError(f"axes={axes} must name at least one axis, and each axis once")
        grid = Grid([self.dims[axis] for axis in kept], [self.periods[axis] for axis in kept])
        return type(self)(_part(self.group, self._grid.parts(kept)), grid)

    def halo(self, array: A, width: int | Sequence[int] = 1, *, timeout: Timeout = None) -> Work[A]:
        """Fill the ghost cells of `array` with the adjacent cells of the neighbours' arrays.

            width 1, two ranks along the axis      | g a b c g |   | g d e f g |
            after it                               | g a b c d |   | c d e f g |

        The first axes of the array are the axes of the grid; further axes may follow. On each grid axis, the array has
        `width` more cells on either side than the part that this rank computes. Axes are exchanged one after the other,
        including the ghost cells of earlier axes, so corners are filled, too. Ghost cells beyond the end of the grid
        stay unchanged. The array belongs to the exchange until it has ended. Meanwhile the program may read the cells
        that are more than `width` cells inside.

        All ranks of the grid call it, in the same order. Arrays of neighbours have equal lengths on the other axes.

        Args:
            array: an array whose slices share its memory, such as one of NumPy, torch or CuPy; of any layout.
            width: number of ghost cells on each side; or a list of one number per grid axis, 0 for no ghost cells.
            timeout: seconds for each message; None is the group's.

        Returns:
            Work that yields `array`; the exchange proceeds while the program computes.

        Raises:
            TypeError: `array` is not such an array, or `width` is not an int.
            ValueError: `array` has too few axes, or too few cells on an axis, or is read-only; or `width` is negative.
            RuntimeError: the call is inside a block of `coalescing`.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: one step per axis, which sends and receives two messages of one face each.
        """
        count = len(self.dims)
        widths = ints(width, "width") if hasattr(width, "__iter__") else ints([width], "width") * count
        if len(widths) != count or min(widths) < 0:
            raise ValueError(f"width={width} must be an int >= 0, or {count} of them, one per axis")
        axes = [Axis(axis, each, *self._grid.shift(self._rank, axis, 1)) for axis, each in enumerate(widths) if each]
        check_array(array, axes, count)
        tag = TAGS + self._exchanges % (TAGS // (2 * count)) * 2 * count
        work: Work[A] = exchange(self._dispatcher, self._messages, array, axes, tag, timeout)
        self._exchanges += 1
        return work


def make_cartesian(group: G, size: int, dims: Sequence[int], periods: bool | Sequence[bool] | None) -> Any:
    """Make a grid of the first ranks of `group`, which has `size` ranks; return None on a rank outside the grid."""
    lengths = ints(dims, "dims")
    if not lengths or min(lengths) < 0:
        raise ValueError(
            f"dims={lengths} must have at least one axis and no negative length; use 0 to let aiocoll choose a length"
        )
    if periods is None or isinstance(periods, bool):
        periods = [bool(periods)] * len(lengths)
    ring = list(periods)
    if len(ring) != len(lengths) or not all(each in (False, True) for each in ring):
        raise ValueError(f"periods={ring} must be a bool, or {len(lengths)} of them, one per axis")
    lengths = list(balanced(size, lengths))
    if prod(lengths) > size:
        raise ValueError(f"dims={lengths} needs {prod(lengths)} ranks, but the group has {size}")
    grid = Grid(lengths, [bool(each) for each in ring])
    made = _part(group, [list(range(grid.size))])
    return None if made is None else CartesianGroup(made, grid)


def _part(group: Any, lists: Sequence[Sequence[int]]) -> Any:
    """Make one group for each list of ranks; return the group that contains this rank, or None."""
    return parts_of(group).reconfigurer.split(lists, None, None, parts_of(group).lifetime.is_ending).result()
