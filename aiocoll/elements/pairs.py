"""Kernels of MINLOC and MAXLOC, which reduce pairs of value and index.

The pair with the smallest or largest value is selected. The lowest index wins a tie. A NaN wins over numbers, as in MIN
and MAX. Of equal pairs, that of the lowest rank is selected.

Arrays of pairs are structured arrays of two fields, the value first. They are reduced in place if both fields have the
width of the wider field, without padding. Other layouts are copied to that layout during the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from aiocoll.elements.buffers import Buffer
from aiocoll.elements.dtypes import DType, from_numpy, to_float32
from aiocoll.elements.kernels import Array, Kernel, chain
from aiocoll.elements.records import Record

__all__ = ["LOCATING", "Pair", "pair_buffer", "pair_kernel"]

#: Maps MINLOC and MAXLOC to the comparison that is true if its first value is preferred.
LOCATING: Mapping[str, np.ufunc] = MappingProxyType({"MINLOC": np.less, "MAXLOC": np.greater})
#: Kinds of dtypes on which MIN and MAX are defined.
_VALUES = ("bool", "int", "uint", "float", "half")


@dataclass(frozen=True, slots=True, eq=False)
class Pair(DType):
    """An element type for (value, index) pairs in the layout of the kernels, named after the user's structured dtype.

    Attributes:
        value: type of the values, in the first half of a pair.
        index: dtype of the indices, in the second half.
    """

    value: DType
    index: np.dtype[Any]


# The only `Pair` for each structured element type of user arrays.
_PAIRS: WeakKeyDictionary[Record, Pair] = WeakKeyDictionary()


def pair_buffer(buffer: Buffer, op: Any, *, writable: bool) -> Buffer:
    """Convert a structured array's buffer to a buffer of pairs if `op` is MINLOC or MAXLOC.

    Args:
        buffer: the buffer of the array.
        op: a `ReduceOp`. For other ops than MINLOC and MAXLOC, `buffer` itself is returned.
        writable: whether the operation writes to the array.

    Raises:
        TypeError: the elements are not pairs.
    """
    record, name = buffer.dtype, str(getattr(op, "wire_name", ""))
    if name not in LOCATING or not isinstance(record, Record):
        return buffer
    pair = _PAIRS.get(record)
    if pair is None:
        pair = _PAIRS[record] = _pair(record, name)
    half = pair.itemsize // 2
    given: Array = buffer.array.view(record.array)
    fields: Any = record.array.fields
    value, index = record.array.names or ()
    if (fields[value][1], fields[index][1], record.itemsize) == (0, half, pair.itemsize):
        return Buffer(given.view(pair.storage), pair, buffer.shape, buffer.result, buffer.writeback)
    staged = np.empty(buffer.count, pair.storage)
    values, indices = _halves(staged, fields[value][0], pair.index)
    values[:], indices[:] = given[value], given[index]

    def writeback() -> Any:
        given[value], given[index] = values, indices
        return buffer.finish()

    return Buffer(staged, pair, buffer.shape, buffer.result, writeback if writable else None)


def _pair(record: Record, name: str) -> Pair:
    names, fields = record.array.names or (), record.array.fields
    if len(names) == 2 and fields is not None:
        value, index = (fields[each][0] for each in names)
        if index.kind in "iu" and index.isnative and (kind := from_numpy(value)).kind in _VALUES:
            nbytes = 2 * max(value.itemsize, index.itemsize)
            return Pair(record.name, record.code, nbytes, np.dtype(f"V{nbytes}"), "pair", kind, index)
    raise TypeError(
        f"op {name} accepts pairs of two fields, a real number and an integer, such as "
        f"np.dtype([('value', 'f8'), ('index', 'i8')]), not {record.name}"
    )


def _halves(pairs: Array, value: np.dtype[Any], index: np.dtype[Any]) -> tuple[Array, Array]:
    """Return two strided views of a flat array of pairs: the values and the indices."""
    nbytes = pairs.itemsize
    values, indices = nbytes // value.itemsize, nbytes // index.itemsize
    return pairs.view(value)[::values], pairs.view(index)[indices // 2 :: indices]


def pair_kernel(name: str, dtype: Pair) -> Kernel:
    """Return the kernel of MINLOC or MAXLOC."""
    wins, storage, readable = LOCATING[name], dtype.value.storage, _readable(dtype.value)
    may_be_nan = dtype.value.kind in ("float", "half")

    def combine(a: Array, b: Array, out: Array) -> None:
        (left, i), (right, j) = _halves(a, storage, dtype.index), _halves(b, storage, dtype.index)
        x, y = readable(left), readable(right)
        same, better = x == y, wins(y, x)
        if may_be_nan:
            left_nan, right_nan = x != x, y != y
            same |= left_nan & right_nan
            better |= right_nan & ~left_nan
        np.copyto(out, np.where(better | (same & (j < i)), b, a))

    return Kernel(combine, chain(combine, dtype.storage, None))


def _readable(dtype: DType) -> Callable[[Array], Array]:
    """Return a function that converts stored values to numbers which NumPy can compare."""
    if dtype.kind == "half":
        convert = to_float32(dtype)

        def read(x: Array) -> Array:
            wide = np.empty(len(x), np.float32)
            convert(x, wide)
            return wide

        return read
    if dtype.is_narrow and dtype.kind == "int":
        sign = np.uint8(1 << int(dtype.name[-1]) - 1)
        return lambda x: x ^ sign
    return lambda x: x
