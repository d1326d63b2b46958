"""Groups whose ranks form a grid: coordinates, neighbours, grids of fewer axes, and the exchange of faces."""

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
    """A grid of ranks, seen by one of them; `ProcessGroup.cart` makes it.

    The ranks of `group` are numbered along the last axis first. Tags from 2**29 on of its messages are for `halo`.

    Attributes:
        group: the `ProcessGroup` of the ranks of the grid, for all other calls. It is closed by itself, or with the
            group that it was made from.
        dims: number of ranks along each axis.
        periods: whether each axis goes round, so that its last rank has the first as a neighbour.
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
        """Return where a rank is.

        Args:
            rank: of `group`; None is this one.

        Returns:
            A coordinate for each axis, from 0.

        Raises:
            TypeError, ValueError: `rank` is no rank of the group.
        """
        return self._grid.coords(self._rank if rank is None else self._dispatcher.check_rank(rank, "rank"))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at a place.

        Args:
            coords: a coordinate for each axis; on a periodic one it goes round.

        Returns:
            Its number in `group`; `PROC_NULL` if the place is outside of the grid.

        Raises:
            TypeError, ValueError: `coords` is not a list of one int for each axis.
        """
        place = ints(coords, "coords")
        if len(place) != len(self.dims):
            raise ValueError(f"coords={place} must be {len(self.dims)} ints, one for each axis")
        return self._grid.rank_at(place)

    def shift(self, axis: int, displacement: int = 1) -> tuple[int, int]:
        """Return from which rank to receive, and to which to send, when all ranks pass something on along an axis.

        Args:
            axis: of the grid; -1 is the last.
            displacement: how far, towards higher coordinates.

        Returns:
            Source and destination; either is `PROC_NULL` where the grid ends.

        Raises:
            TypeError, ValueError: an argument is no int, or there is no such axis.
        """
        (distance,) = ints([displacement], "displacement")
        return self._grid.shift(self._rank, self._grid.axis(axis), distance)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The rank below and the rank above, of each axis in turn; `PROC_NULL` where the grid ends."""
        return tuple(rank for axis in range(len(self.dims)) for rank in self._grid.shift(self._rank, axis, 1))

    def sub(self, axes: int | Sequence[int]) -> Self:
        """Make the grids of the ranks that differ on some axes only: the rows or the columns of this one.

        All ranks of the grid call it, in the same order as other calls that make groups from `group`.

        Args:
            axes: one axis that the new grid has, or several, in any order: they keep the order of this grid.

        Returns:
            The grid this rank is in.

        Raises:
            TypeError, ValueError: `axes` names an axis twice, or one that is none, or none at all.
            GroupError: the group is closed or has failed.

        Cost: nothing is sent.
        """
        given: list[Any] = list(axes) if hasattr(axes, "__iter__") else [axes]
        kept = sorted({self._grid.axis(axis) for axis in given})
        if not kept or len(kept) < len(given):
            raise ValueError(f"axes={axes}: name at least one axis, and each once")
        grid = Grid([self.dims[axis] for axis in kept], [self.periods[axis] for axis in kept])
        return type(self)(_part(self.group, self._grid.parts(kept)), grid)

    def halo(self, array: A, width: int | Sequence[int] = 1, *, timeout: Timeout = None) -> Work[A]:
        """Fill the ghost cells of `array` with the cells of the neighbours next to them.

            width 1, two ranks along the axis      | g a b c g |   | g d e f g |
            after it                               | g a b c d |   | c d e f g |

        The first axes of the array are those of the grid; it may have more. Each is `width` cells longer on either side
        than the part that this rank computes. Axes are exchanged one after the other, each with the ghost cells of
        those before it, so corners are filled, too. Ghost cells beyond the end of the grid stay as they are. The array
        belongs to the exchange until it has ended, but for the cells farther inside than `width`, which may be read.

        All ranks of the grid call it, in the same order; the lengths of neighbours agree on the other axes.

        Args:
            array: whose slices share its memory, as those of NumPy, torch and CuPy do; of any layout.
            width: of the ghost cells on each side; or a list of one for each axis of the grid, 0 for none.
            timeout: seconds for each message; None is the group's.

        Returns:
            Work that yields `array`; it goes on while the program computes.

        Raises:
            TypeError: `array` is none of these, or `width` no int.
            ValueError: `array` has too few axes, or too few cells on one, or is read-only; or `width` is negative.
            RuntimeError: it is called in a block of `coalescing`.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: a step for each axis: two messages of a face each to send, and two to receive.
        """
        count = len(self.dims)
        widths = ints(width, "width") if hasattr(width, "__iter__") else ints([width], "width") * count
        if len(widths) != count or min(widths) < 0:
            raise ValueError(f"width={width}: must be an int >= 0, or {count} of them, one for each axis")
        axes = [Axis(axis, each, *self._grid.shift(self._rank, axis, 1)) for axis, each in enumerate(widths) if each]
        check_array(array, axes, count)
        tag = TAGS + self._exchanges % (TAGS // (2 * count)) * 2 * count
        work: Work[A] = exchange(self._dispatcher, self._messages, array, axes, tag, timeout)
        self._exchanges += 1
        return work


def make_cartesian(group: G, size: int, dims: Sequence[int], periods: bool | Sequence[bool] | None) -> Any:
    """Make a grid of the first ranks of `group`, which has `size`; None on the others."""
    lengths = ints(dims, "dims")
    if not lengths or min(lengths) < 0:
        raise ValueError(f"dims={lengths}: give at least one axis, and no negative length; 0 is chosen for you")
    if periods is None or isinstance(periods, bool):
        periods = [bool(periods)] * len(lengths)
    ring = list(periods)
    if len(ring) != len(lengths) or not all(each in (False, True) for each in ring):
        raise ValueError(f"periods={ring} must be a bool, or {len(lengths)} of them, one for each axis")
    lengths = list(balanced(size, lengths))
    if prod(lengths) > size:
        raise ValueError(f"dims={lengths} are {prod(lengths)} ranks, the group has {size}")
    grid = Grid(lengths, [bool(each) for each in ring])
    made = _part(group, [list(range(grid.size))])
    return None if made is None else CartesianGroup(made, grid)


def _part(group: Any, lists: Sequence[Sequence[int]]) -> Any:
    """Return the group of that list which has this rank."""
    return parts_of(group).reconfigurer.split(lists, None, None, parts_of(group).lifetime.is_ending).result()
