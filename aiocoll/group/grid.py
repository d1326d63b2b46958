"""Arithmetic of rank grids: coordinates, neighbours, and balanced lengths."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

from aiocoll.group.dispatch.dispatcher import PROC_NULL

__all__ = ["Grid", "balanced", "ints"]


class Grid:
    """A grid of ranks in row-major order: the last coordinate changes fastest.

    Args:
        dims: number of ranks along each axis.
        periods: whether each axis is periodic.

    Attributes:
        dims, periods: as given.
        size: number of ranks.
    """

    def __init__(self, dims: Sequence[int], periods: Sequence[bool]) -> None:
        self.dims = tuple(dims)
        self.periods = tuple(periods)
        self.size = prod(dims)

    def coords(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank in the grid."""
        found = []
        for length in reversed(self.dims):
            rank, coordinate = divmod(rank, length)
            found.append(coordinate)
        return tuple(reversed(found))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at the given coordinates; `PROC_NULL` if they are outside the grid."""
        rank = 0
        for coordinate, length, periodic in zip(coords, self.dims, self.periods, strict=True):
            if not periodic and not 0 <= coordinate < length:
                return PROC_NULL
            rank = rank * length + coordinate % length
        return rank

    def shift(self, rank: int, axis: int, displacement: int) -> tuple[int, int]:
        """Return the two ranks at the distance `displacement` from `rank` on an axis: below and above."""
        here = self.coords(rank)
        below, above = (
            self.rank_at([*here[:axis], here[axis] + step, *here[axis + 1 :]]) for step in (-displacement, displacement)
        )
        return below, above

    def axis(self, axis: Any) -> int:
        """Return an axis as a non-negative number; raise an error if the grid has no such axis."""
        number, count = _int(axis, "axis"), len(self.dims)
        if not -count <= number < count:
            raise ValueError(f"axis={number} is out of range: the grid has {count} axes")
        return number % count

    def parts(self, kept: Sequence[int]) -> list[list[int]]:
        """Return one list of ranks for each subgrid along the axes `kept`, which must be in ascending order."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            here = self.coords(rank)
            others = tuple(coordinate for axis, coordinate in enumerate(here) if axis not in kept)
            lines.setdefault(others, []).append(rank)
        return list(lines.values())


def balanced(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Replace zeros in `dims` by lengths as equal as possible, the largest first, so that the product is `size`.

    Raises:
        ValueError: no lengths have that product.
    """
    known = prod(length for length in dims if length)
    missing = sum(not length for length in dims)
    if not missing:
        return tuple(dims)
    if size % known:
        raise ValueError(f"dims={list(dims)}: the {size} ranks of the group are not a multiple of {known}")
    found = iter(_factors(size // known, missing, size) or ())
    return tuple(length or next(found) for length in dims)


def _factors(number: int, count: int, most: int) -> tuple[int, ...] | None:
    """Return `count` factors of `number`, each at most `most`, as equal as possible."""
    if count == 1:
        return (number,) if number <= most else None
    for largest in range(1, most + 1):
        if number % largest == 0 and largest**count >= number:
            rest = _factors(number // largest, count - 1, largest)
            if rest is not None:
                return (largest, *rest)
    return None


def ints(values: Any, name: str) -> list[int]:
    """Return `values` as a list of ints; raise an error if one of them is not an int."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a list of ints, not {type(values).__name__}")
    return [_int(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _int(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
