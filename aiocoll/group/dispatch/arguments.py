"""Checks of a call's arrays: dtypes, counts, devices, and overlapping memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from aiocoll.elements.allocate import same_place
from aiocoll.elements.buffers import Buffer, clash, overlaps, view

__all__ = ["Arguments", "slices"]

_ndarray: Final = np.ndarray


class Arguments:
    """Checks of the arrays passed to collectives, and their conversion to buffers.

    Args:
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def blocks(self, arrays: Any, name: str, like: Buffer | None, of: str, *, writable: bool = True) -> list[Any]:
        """Return a buffer for each array. All must have the dtype and device of `like`, or else of the first array.

        Args:
            arrays: one array per rank.
            name: name of the list in errors.
            like: buffer to compare with; None: the first array.
            of: name of `like` in errors.
            writable: whether the arrays are outputs, which must not share memory.
        """
        blocks = [view(each, name=f"{name}[{rank}]", writable=writable) for rank, each in enumerate(arrays)]
        like = blocks[0] if like is None else like
        place: Any = type(like.array)
        for rank, block in enumerate(blocks):
            if block.dtype is not like.dtype:
                raise TypeError(f"{name}[{rank}] has dtype {block.dtype.name}, expected {like.dtype.name}")
            if type(block.array) is not place or place is not _ndarray:
                same_place(block, name, like, of, rank)
        if writable and (found := clash([block.array for block in blocks])) is not None:
            raise ValueError(f"{name}[{found[0]}] and {name}[{found[1]}] share memory: pass one array per rank")
        return blocks

    def check_outputs_separate(self, blocks: Sequence[Buffer | None], source: Buffer) -> None:
        """Raise an error if the output for another rank shares memory with this rank's contribution."""
        for rank, block in enumerate(blocks):
            if rank != self._rank and block is not None and overlaps(block.array, source.array):
                raise ValueError(f"tensor shares memory with the output of rank {rank}: it would be overwritten")

    def check_none(self, arrays: Any, name: str, root: int) -> None:
        """Raise an error if a rank other than the root passes arrays that only the root may pass."""
        if arrays is not None and (not hasattr(arrays, "__len__") or len(arrays)):
            raise ValueError(f"{name} must be None or [] on rank {self._rank}: only the root, rank {root}, has {name}")

    def require_buffer(
        self, array: Any, name: str, like: Buffer, of: str, count: int, *, writable: bool = True
    ) -> Buffer:
        """Return an array's buffer; raise an error unless it has `count` elements and `like`'s dtype and device."""
        buffer = view(array, name=name, writable=writable)
        if buffer.dtype is not like.dtype:
            raise TypeError(f"{name} has dtype {buffer.dtype.name}, expected {like.dtype.name}")
        place: Any = type(like.array)
        if type(buffer.array) is not place or place is not _ndarray:
            same_place(buffer, name, like, of)
        if buffer.count != count:
            raise ValueError(f"{name} has {buffer.count} elements, expected {count}, {self._size} times those of {of}")
        return buffer

    def same_count(self, block: Any, other: Buffer, name: str, other_name: str) -> None:
        """Raise an error if two arrays have different numbers of elements."""
        if block.count != other.count:
            raise ValueError(f"{name} has {block.count} elements, {other_name} has {other.count}; they must be equal")

    def splits(self, buffer: Buffer, sizes: Sequence[int] | None, name: str) -> list[int]:
        """Return the number of elements of `buffer` that belong to each rank."""
        rows = buffer.shape[0] if buffer.shape else 1
        if sizes is None:
            if rows % self._size:
                raise ValueError(
                    f"{name} has {rows} rows, not a multiple of {self._size} ranks: pass {name}_split_sizes"
                )
            sizes = [rows // self._size] * self._size
        try:
            sizes = [operator.index(size) for size in sizes]
        except TypeError:
            raise TypeError(f"{name}_split_sizes must be a list of ints or None, not {sizes!r}") from None
        if len(sizes) != self._size or any(size < 0 for size in sizes) or sum(sizes) != rows:
            raise ValueError(
                f"{name}_split_sizes={sizes} must be {self._size} non-negative numbers whose sum is {rows}, "
                f"the rows of {name}"
            )
        row = buffer.count // rows if rows else 0
        return [size * row for size in sizes]


def slices(whole: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Divide a buffer into consecutive views; view i has `counts[i]` elements."""
    parts, start, unit = [], 0, whole.dtype.unit
    for count in counts:
        part = Buffer(whole.array[start : start + count * unit], whole.dtype, (count,), None)
        part.count = count
        parts.append(part)
        start += count * unit
    return parts
