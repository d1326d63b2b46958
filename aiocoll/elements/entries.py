"""Entries of sparse arrays: indices and values, and their sums over several ranks.

The index of an entry (`places`) is its row-major position in the array. If entries are small dense arrays, it is the
position of the whole entry. All functions are pure and may run in a thread: NumPy releases the GIL in all slow steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, from_float32, to_float32

__all__ = [
    "Entries",
    "check_entries",
    "coalesce_entries",
    "gather_entries",
    "merge_entries",
    "pack",
    "scatter_entries",
    "unpack",
]

Array = NDArray[Any]


class Entries(NamedTuple):
    """The entries of a sparse array in ascending order of their indices, one entry per index.

    Attributes:
        places: the indices; 1-D, int32 or int64.
        values: the values, in the dtype's storage; 1-D, or ``[n, width]`` if each entry has `width` > 1 elements.
    """

    places: Array
    values: Array


def coalesce_entries(places: Array, values: Array, dtype: DType) -> Entries:
    """Sort entries by index, and add up entries with the same index, like torch's ``coalesce``.

    float16, bfloat16 and float8 values are added up in float32 and rounded once.

    Cost: n log n time, or n if the entries are already sorted.
    """
    if not len(places):
        return Entries(places, values)
    ascending = places[1:] >= places[:-1]
    if not ascending.all():
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
    first = _first_of_runs(places)
    if first.all():
        return Entries(places, values)
    starts = np.flatnonzero(first)
    wide = _widen(values, dtype)
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(wide, starts, axis=0, dtype=wide.dtype)
    return Entries(places[starts], _narrow(sums, dtype))


def check_entries(entries: Entries, size: int) -> Entries:
    """Check that another rank's entries have ascending indices that fit an array of `size` elements; return them.

    Raises:
        ValueError: the indices do not ascend, or are out of range.
    """
    places = entries.places
    if len(places) and not (places[0] >= 0 and places[-1] < size and (places[1:] > places[:-1]).all()):
        raise ValueError(
            f"received entries whose indices do not ascend within 0 to {size - 1}; the program of the sender is faulty"
        )
    return entries


def merge_entries(parts: Sequence[Entries], dtype: DType, divide: Callable[[Array], None] | None = None) -> Entries:
    """Add up the entries of several ranks; return the union of their indices, with the sum at each index.

    Values are added in the order of `parts`. float16, bfloat16 and float8 values are added up in float32 and rounded
    once. The sum of bool is *or*. Integers wrap.

    Args:
        parts: the entries of each rank.
        dtype: their element type.
        divide: divides the flat sums in place before they are rounded, for an average; or None.

    Cost: n log p time for n entries of p ranks, since a stable sort merges sorted lists.
    """
    parts = [part for part in parts if len(part.places)] or list(parts[:1])
    if len(parts) == 1 and divide is None:
        return Entries(parts[0].places.copy(), parts[0].values.copy())  # aligned and not shared
    every = np.concatenate([part.places for part in parts])
    every.sort(kind="stable")  # a stable sort merges the sorted parts
    places = every[_first_of_runs(every)]
    sums = np.zeros((len(places), *parts[0].values.shape[1:]), np.float32 if dtype.kind == "half" else dtype.storage)
    with np.errstate(all="ignore"):
        for part in parts:
            # NumPy's `+=` would lose additions of a repeated index, but the entries of a rank repeat no index.
            sums[np.searchsorted(places, part.places)] += _widen(part.values, dtype)
    if divide is not None:
        divide(sums.reshape(-1))
    return Entries(places, _narrow(sums, dtype))


def scatter_entries(entries: Entries, size: int) -> tuple[Array, Array]:
    """Return entries as a flat dense array of `size` elements, with a bitmap (uint8) of the entries' indices."""
    dense = np.zeros((size, *entries.values.shape[1:]), entries.values.dtype)
    dense[entries.places] = entries.values
    marks = np.zeros(size, np.bool_)
    marks[entries.places] = True
    return dense.reshape(-1), np.packbits(marks)


def gather_entries(dense: Array, bits: Array, size: int, like: Entries) -> Entries:
    """Return the entries of a flat dense array: the elements whose bits are set in the bitmap.

    Args:
        dense: 1-D array of `size` entries.
        bits: bitmap (uint8), as made by `scatter_entries`.
        size: number of indices.
        like: entries with the dtypes and the width of the result.
    """
    places = np.flatnonzero(np.unpackbits(bits, count=size).view(np.bool_))
    return Entries(places.astype(like.places.dtype, copy=False), dense.reshape(size, *like.values.shape[1:])[places])


def pack(entries: Entries) -> Array:
    """Return entries as bytes (uint8): first the indices, then the values."""
    places, values = entries
    packed = np.empty(places.nbytes + values.nbytes, np.uint8)
    packed[: places.nbytes] = _bytes(places)
    packed[places.nbytes :] = _bytes(values)
    return packed


def unpack(packed: Array, count: int | None, like: Entries) -> Entries:
    """Return the entries that `pack` has packed. The packed bytes may be unaligned.

    Args:
        packed: the bytes (uint8).
        count: number of entries, which then share the memory of `packed`; None to return copies of all entries.
        like: entries with the dtypes and the width of the result.
    """
    if count is None:
        row = like.places.itemsize + like.values.itemsize * math.prod(like.values.shape[1:])
        places, values = unpack(packed, len(packed) // row, like)
        return Entries(places.copy(), values.copy())
    split = count * like.places.itemsize
    values = packed[split:].view(like.values.dtype)
    return Entries(packed[:split].view(like.places.dtype), values.reshape(count, *like.values.shape[1:]))


def _first_of_runs(places: Array) -> Array:
    """Return a mask (bool) that selects the first entry of each run of equal indices."""
    first = np.ones(len(places), np.bool_)
    np.not_equal(places[1:], places[:-1], out=first[1:])
    return first


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _widen(values: Array, dtype: DType) -> Array:
    """Convert `values` to the dtype of their sums: float32 for floats of at most 16 bits."""
    if dtype.kind != "half":
        return values
    wide = np.empty(values.shape, np.float32)
    to_float32(dtype)(np.ascontiguousarray(values).reshape(-1), wide.reshape(-1))
    return wide


def _narrow(sums: Array, dtype: DType) -> Array:
    if dtype.kind != "half":
        return sums
    narrow = np.empty(sums.shape, dtype.storage)
    with np.errstate(all="ignore"):
        from_float32(dtype)(np.ascontiguousarray(sums).reshape(-1), narrow.reshape(-1))
    return narrow
