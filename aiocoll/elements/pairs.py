"""MINLOC and MAXLOC: pairs of a value and an index, of which the smallest or largest value wins, ties by the index.

A NaN wins, as it does in MIN and MAX, and of several that with the lowest index. What is selected is a whole pair; of
equal pairs, that of the lowest rank.

Arrays of pairs are structured: two fields, the value first. They are reduced where they lie if both fields have the
width of the wider one and nothing is between; others are copied to that layout for the time of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from aiocoll.elements.buffers import Buffer
from aiocoll.elements.dtypes import DType, of_numpy, to_float32
from aiocoll.elements.kernels import Array, Kernel, chain
from aiocoll.elements.records import Record

__all__ = ["LOCATING", "Pair", "pair_kernel", "paired"]

#: What says whether a value wins against another.
LOCATING: Mapping[str, np.ufunc] = MappingProxyType({"MINLOC": np.less, "MAXLOC": np.greater})
#: Kinds of values that MIN and MAX are defined on.
_VALUES = ("bool", "int", "uint", "float", "half")


@dataclass(frozen=True, slots=True, eq=False)
class Pair(DType):
    """A type of pairs in the layout that is reduced; its name is that of the user's layout.

    Attributes:
        value: type of the values, in the first half.
        index: dtype of the indices, in the other.
    """

    value: DType
    index: np.dtype[Any]


# One instance per type.
_PAIRS: WeakKeyDictionary[Record, Pair] = WeakKeyDictionary()


def paired(buffer: Buffer, op: Any, *, writable: bool) -> Buffer:
    """Return a buffer of pairs for an op that selects them, in place of the buffer of a structured array.

    Args:
        buffer: of the array.
        op: a `ReduceOp`; if it selects no pairs, the buffer itself is returned.
        writable: whether the operation writes to it.

    Raises:
        TypeError: its elements are no pairs.
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
        if index.kind in "iu" and index.isnative and (kind := of_numpy(value)).kind in _VALUES:
            nbytes = 2 * max(value.itemsize, index.itemsize)
            return Pair(record.name, record.code, nbytes, np.dtype(f"V{nbytes}"), "pair", kind, index)
    raise TypeError(
        f"op {name} takes pairs, which are two fields: a real number and an integer, such as those of "
        f"np.dtype([('value', 'f8'), ('index', 'i8')]), not {record.name}"
    )


def _halves(pairs: Array, value: np.dtype[Any], index: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the values and the indices of a flat array of pairs."""
    nbytes = pairs.itemsize
    values, indices = nbytes // value.itemsize, nbytes // index.itemsize
    return pairs.view(value)[::values], pairs.view(index)[indices // 2 :: indices]


def pair_kernel(name: str, dtype: Pair) -> Kernel:
    """Return the kernel of an op that selects pairs."""
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
    """Return what makes numbers that NumPy can compare of stored ones."""
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
