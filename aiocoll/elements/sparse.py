"""Conversion of sparse arrays to entries (indices and values), and back.

This module converts arrays of scipy.sparse, without importing it. Adapters convert arrays of other libraries.

========================================  ===========================================================
scipy.sparse COO, CSR, CSC                in place: the object gets new arrays
torch COO, also with dense dimensions     in place: the tensor gets new indices and values
torch CSR                                 the result is a new tensor: a CSR tensor cannot get more entries
========================================  ===========================================================
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.adapters import adapter_of_type
from aiocoll.elements.dtypes import DType, from_numpy
from aiocoll.elements.entries import Entries, check_entries, coalesce_entries, unpack

__all__ = [
    "SparseArray",
    "coordinates_of",
    "describe_sparse",
    "empty_entries",
    "entries_of",
    "expand_pointers",
    "flat_places",
    "fresh_like",
    "is_sparse",
    "row_pointers",
    "sparse_array",
]

Array = NDArray[Any]
_INT32 = np.iinfo(np.int32).max


class SparseArray(NamedTuple):
    """The description of a user's sparse array.

    Attributes:
        shape: all dimensions, sparse dimensions first.
        sparse_dim: number of sparse dimensions.
        dtype: element type.
        size: number of possible entries: the product of the sparse dimensions.
        width: elements per entry: the product of the dense dimensions.
        stored: number of stored entries, including several at one index.
        effort: number of values that `read` reads.
        read: returns the entries, one per index; may run in a thread. Raises ValueError for indices out of range.
        build: converts entries to the library's format; may run in a thread. It returns a function that stores them in
            the caller's array and returns the result.
    """

    shape: tuple[int, ...]
    sparse_dim: int
    dtype: DType
    size: int
    width: int
    stored: int
    effort: int
    read: Callable[[], Entries]
    build: Callable[[Entries], Callable[[], Any]]


def is_sparse(obj: Any) -> bool:
    """Return whether `obj` is a sparse array of scipy.sparse or of a library with an adapter."""
    adapter = adapter_of_type(type(obj))
    if adapter is not None:
        return adapter.is_sparse(obj)
    scipy = sys.modules.get("scipy.sparse")
    return scipy is not None and bool(scipy.issparse(obj))


def sparse_array(obj: Any, name: str = "tensor") -> SparseArray:
    """Return the description of a sparse array, in constant time.

    Raises:
        TypeError: its format or dtype is not supported.
        ValueError: it has 2**63 or more possible entries.
    """
    array = _array_of(obj, name)
    if array.size > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has shape {array.shape}: {array.size} possible entries do not fit in 64-bit indices")
    return array


def _array_of(obj: Any, name: str) -> SparseArray:
    adapter = adapter_of_type(type(obj))
    if adapter is not None:
        return adapter.sparse_array(obj, name)
    if obj.format == "coo":
        return _describe_coo(obj, name)
    if obj.format in ("csr", "csc"):
        return _describe_compressed(obj, name)
    raise TypeError(f"{name} is a {type(obj).__name__} in format {obj.format!r}; pass {name}.tocsr() or {name}.tocoo()")


def empty_entries(array: SparseArray) -> Entries:
    """Return an `Entries` without any entry, with the dtypes and the width of the entries of `array`."""
    values = np.empty((0,) if array.width == 1 else (0, array.width), array.dtype.storage)
    return Entries(np.empty(0, np.int32 if array.size <= _INT32 else np.int64), values)


def entries_of(array: SparseArray, packed: Array) -> Entries:
    """Unpack and check the entries that another rank has packed from an array like `array`; return a copy.

    Raises:
        ValueError: the indices do not fit such an array.
    """
    return check_entries(unpack(packed, None, empty_entries(array)), array.size)


def fresh_like(obj: Any, sparse_dim: int, shape: tuple[int, ...]) -> Any:
    """Return a new sparse array without entries, with the library, format and dtype of `obj`."""
    adapter = adapter_of_type(type(obj))
    return type(obj)(shape, dtype=obj.dtype) if adapter is None else adapter.fresh_sparse(obj, sparse_dim, shape)


# -- scipy.sparse


def _describe_coo(obj: Any, name: str) -> SparseArray:
    shape, dtype = obj.shape, _scipy_dtype(obj, name)

    def read() -> Entries:
        return coalesce_entries(flat_places(obj.coords, shape, name), _plain(obj.data), dtype)

    def build(entries: Entries) -> Callable[[], Any]:
        like = np.result_type(*(each.dtype for each in obj.coords))
        coords = tuple(each.astype(like, copy=False) for each in coordinates_of(entries.places, shape))

        def put() -> Any:
            obj.coords, obj.data, obj.has_canonical_format = coords, entries.values, True
            return obj

        return put

    return describe_sparse(shape, len(shape), dtype, obj.nnz, 0, read, build)


def _describe_compressed(obj: Any, name: str) -> SparseArray:
    dtype = _scipy_dtype(obj, name)
    shape = obj.shape if len(obj.shape) == 2 else (1, *obj.shape)  # treat a 1-D CSR array as an array with one row
    by_column = obj.format == "csc"
    rows = shape[1 if by_column else 0]

    def read() -> Entries:
        coords = expand_pointers(obj.indptr, obj.indices, name)
        values = _plain(obj.data[: len(coords[0])])
        return coalesce_entries(flat_places(coords[::-1] if by_column else coords, shape, name), values, dtype)

    def build(entries: Entries) -> Callable[[], Any]:
        places, values = entries
        major, minor = coordinates_of(places, shape)
        if by_column:
            order = np.argsort(minor, kind="stable")
            major, minor, values = minor[order], major[order], values[order]
        # A sum may have more entries than an int32 can count, even if no input has.
        like = obj.indptr.dtype if len(places) <= _INT32 else np.dtype(np.int64)
        indptr = row_pointers(major, rows).astype(like, copy=False)
        indices = minor.astype(like, copy=False)

        def put() -> Any:
            obj.indptr, obj.indices, obj.data = indptr, indices, values
            obj.has_sorted_indices = obj.has_canonical_format = True
            return obj

        return put

    return describe_sparse(obj.shape, len(obj.shape), dtype, obj.nnz, rows, read, build)


def _scipy_dtype(obj: Any, name: str) -> DType:
    try:
        return from_numpy(obj.dtype)
    except TypeError as exc:
        raise TypeError(f"{name}: {exc}") from None


def _plain(array: Any) -> Array:
    """Return `array` as a contiguous `np.ndarray`, converted from a subclass if necessary."""
    return np.ascontiguousarray(array)


# -- indices


def describe_sparse(
    shape: tuple[int, ...],
    sparse_dim: int,
    dtype: DType,
    stored: int,
    rows: int,
    read: Callable[[], Entries],
    build: Callable[[Entries], Callable[[], Any]],
) -> SparseArray:
    """Return the description of a sparse array that has `stored` entries and `rows` index pointers."""
    size, width = math.prod(shape[:sparse_dim]), math.prod(shape[sparse_dim:])
    return SparseArray(
        tuple(shape), sparse_dim, dtype, size, width, stored, (stored + rows) * max(width, 1), read, build
    )


def flat_places(coords: Sequence[Array], shape: Sequence[int], name: str, count: int = 0) -> Array:
    """Return the row-major indices of entries, in the narrowest dtype that can hold any index of the array.

    Args:
        coords: one array of indices per dimension.
        shape: the dimensions.
        name: the array's name in error messages.
        count: number of entries, for an array of no dimensions.

    Raises:
        ValueError: an index is out of range.
    """
    dtype = np.int32 if math.prod(shape) <= _INT32 else np.int64
    places: Array = np.zeros(len(coords[0]) if len(coords) else count, dtype)
    for axis, (index, length) in enumerate(zip(coords, shape, strict=True)):
        if len(index) and not (index.min() >= 0 and index.max() < length):
            raise ValueError(f"{name} has indices in dimension {axis} outside the range 0 to {length - 1}")
        if axis:
            places *= length
        places += index.astype(dtype, copy=False)
    return places


def coordinates_of(places: Array, shape: Sequence[int]) -> list[Array]:
    """Convert row-major indices to one index per dimension: the inverse of `flat_places`."""
    coords: list[Array] = []
    for length in reversed(shape[1:]):
        places, index = np.divmod(places, max(length, 1))
        coords.append(index)
    return [*([places] if shape else []), *reversed(coords)]


def expand_pointers(pointers: Array, indices: Array, name: str) -> tuple[Array, Array]:
    """Return the major and the minor index of every entry of a compressed sparse array.

    Raises:
        ValueError: the index pointers decrease.
    """
    lengths = np.diff(pointers)
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"{name} has decreasing index pointers")
    major = np.repeat(np.arange(len(lengths)), lengths)
    return major, indices[: len(major)]


def row_pointers(major: Array, rows: int) -> Array:
    """Return the index pointers (int64) of `rows` rows, given the row of each entry in ascending order."""
    return np.searchsorted(major, np.arange(rows + 1))
