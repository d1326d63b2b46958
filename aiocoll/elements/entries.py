"""What sparse arrays hold: places, ascending, and the values there; how those of several ranks are added up.

A place is the position of an entry in the array, counted in row-major order; of an array whose entries are small dense
arrays, the position of the entry. Everything here is pure and may run in a thread: NumPy gives the lock back in all of
it that takes long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, from_float32, to_float32

__all__ = ["Entries", "coalesced", "gathered", "merged", "pack", "scattered", "unpack"]

Array = NDArray[Any]


class Entries(NamedTuple):
    """Entries in ascending order of place, one per place.

    Attributes:
        places: 1-D, int32 or int64.
        values: of the dtype's storage; 1-D, or ``[n, width]`` if each entry is an array of `width` elements, not 1.
    """

    places: Array
    values: Array


def coalesced(places: Array, values: Array, dtype: DType) -> Entries:
    """Sort entries by place and add up those of one place, as torch's ``coalesce`` does.

    float16, bfloat16 and float8 values are added up in float32 and rounded once. Time: n log n, or n if sorted already.
    """
    if not len(places):
        return Entries(places, values)
    ascending = places[1:] >= places[:-1]
    if not ascending.all():
        order = np.argsort(places, kind="stable")
        places, values = places[order], values[order]
    first = _first(places)
    if first.all():
        return Entries(places, values)
    starts = np.flatnonzero(first)
    wide = _up(values, dtype)
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(wide, starts, axis=0, dtype=wide.dtype)
    return Entries(places[starts], _down(sums, dtype))


def merged(parts: Sequence[Entries], dtype: DType) -> Entries:
    """Add up the entries of several ranks, in the order of `parts`: the union of their places, and the sums there.

    float16, bfloat16 and float8 values are added up in float32 and rounded once; bool is *or*; integers wrap.
    Time: n log p, since sorting many sorted lists is merging them.
    """
    parts = [part for part in parts if len(part.places)] or list(parts[:1])
    if len(parts) == 1:
        return Entries(parts[0].places.copy(), parts[0].values.copy())  # aligned, and nobody else's
    every = np.concatenate([part.places for part in parts])
    every.sort(kind="stable")  # by merging what is sorted
    places = every[_first(every)]
    sums = np.zeros((len(places), *parts[0].values.shape[1:]), np.float32 if dtype.kind == "half" else dtype.storage)
    with np.errstate(all="ignore"):
        for part in parts:
            # A place comes once in a part, so no addition is lost.
            sums[np.searchsorted(places, part.places)] += _up(part.values, dtype)
    return Entries(places, _down(sums, dtype))


def scattered(entries: Entries, size: int) -> tuple[Array, Array]:
    """Return a dense array of `size` places, flat, and a bit for each that tells if it has an entry, as uint8."""
    dense = np.zeros((size, *entries.values.shape[1:]), entries.values.dtype)
    dense[entries.places] = entries.values
    marks = np.zeros(size, np.bool_)
    marks[entries.places] = True
    return dense.reshape(-1), np.packbits(marks)


def gathered(dense: Array, bits: Array, size: int, like: Entries) -> Entries:
    """Return the entries that `bits` name of a flat dense array of `size` places, in the form of `like`."""
    places = np.flatnonzero(np.unpackbits(bits, count=size).view(np.bool_))
    return Entries(places.astype(like.places.dtype, copy=False), dense.reshape(size, *like.values.shape[1:])[places])


def pack(entries: Entries) -> Array:
    """Return entries as bytes: places, then values."""
    places, values = entries
    packed = np.empty(places.nbytes + values.nbytes, np.uint8)
    packed[: places.nbytes] = _bytes(places)
    packed[places.nbytes :] = _bytes(values)
    return packed


def unpack(packed: Array, count: int, like: Entries) -> Entries:
    """Return `count` entries that `pack` has made, in the form of `like`; they need not be aligned in memory."""
    split = count * like.places.itemsize
    values = packed[split:].view(like.values.dtype)
    return Entries(packed[:split].view(like.places.dtype), values.reshape(count, *like.values.shape[1:]))


def _first(places: Array) -> Array:
    """Mark the first of each run of equal places."""
    first = np.ones(len(places), np.bool_)
    np.not_equal(places[1:], places[:-1], out=first[1:])
    return first


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _up(values: Array, dtype: DType) -> Array:
    """Return what `values` are added up in."""
    if dtype.kind != "half":
        return values
    wide = np.empty(values.shape, np.float32)
    to_float32(dtype)(np.ascontiguousarray(values).reshape(-1), wide.reshape(-1))
    return wide


def _down(sums: Array, dtype: DType) -> Array:
    if dtype.kind != "half":
        return sums
    narrow = np.empty(sums.shape, dtype.storage)
    with np.errstate(all="ignore"):
        from_float32(dtype)(np.ascontiguousarray(sums).reshape(-1), narrow.reshape(-1))
    return narrow
