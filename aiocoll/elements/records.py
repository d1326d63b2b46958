"""Element types that can be sent but not reduced: structured dtypes, dates, and texts or bytes of fixed length.

Their arrays are sent as bytes, whatever the fields contain. Ranks compare the layout: a string with the names, formats
and offsets of all fields, with byte order and padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import numpy as np

from aiocoll.elements.element_type import DType

__all__ = ["LAYOUT", "LONGEST_NAME", "Record", "layout_of", "record", "record_by_code", "record_by_name"]

#: Bit that marks the code of a `Record`. No other element type's code has this bit.
LAYOUT = 1 << 31
#: Maximum number of characters in a type's name. A longer name is truncated and ends with a hash of the whole name.
LONGEST_NAME = 400

_UINT8 = np.dtype(np.uint8)
_KINDS = "VSUMm"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Record(DType):
    """An element type that can be sent but not reduced. Its elements are bytes; its name describes their layout.

    Attributes:
        array: dtype of the user's arrays.
    """

    array: np.dtype[Any]

    def __reduce__(self) -> tuple[Callable[[np.dtype[Any]], DType | None], tuple[np.dtype[Any]]]:
        return record, (self.array,)


# Caches with one `Record` per layout. A `Record` is kept only while other objects refer to it.
_BY_DTYPE: WeakValueDictionary[np.dtype[Any], Record] = WeakValueDictionary()
_BY_CODE: WeakValueDictionary[int, Record] = WeakValueDictionary()
_BY_NAME: WeakValueDictionary[str, Record] = WeakValueDictionary()
# Strong references to the `_KEPT` types used last. A message in flight, or without a matching receive, refers to its
# type only by code.
_LATEST: OrderedDict[int, Record] = OrderedDict()
_KEPT = 256


def record(dtype: np.dtype[Any]) -> Record | None:
    """Return the element type for a structured, date or text dtype; None for any other dtype.

    Raises:
        TypeError: the elements contain Python objects, or have a size of 0 bytes.
    """
    found = _BY_DTYPE.get(dtype)
    if found is not None:
        return _keep(found)
    if dtype.hasobject:
        raise TypeError(
            f"dtype {dtype} contains Python objects, which cannot be sent as bytes; use a dtype without objects, or a "
            "call on objects, such as send_object"
        )
    if dtype.kind not in _KINDS or dtype.type.__module__ == "ml_dtypes":
        return None
    if not dtype.itemsize:
        raise TypeError(f"dtype {dtype} has elements of 0 bytes; use a dtype with at least 1 byte per element")
    name = layout_of(dtype)
    code = LAYOUT | crc32(name.encode())
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 13]}... #{code:08x}"
    made = Record(name, code, dtype.itemsize, _UINT8, "record", dtype)
    _BY_DTYPE[dtype] = _BY_CODE[code] = _BY_NAME[name] = made
    return _keep(made)


def _keep(used: Record) -> Record:
    _LATEST[used.code] = used
    _LATEST.move_to_end(used.code)
    if len(_LATEST) > _KEPT:
        _LATEST.popitem(last=False)
    return used


def record_by_code(code: int) -> Record | None:
    """Return the element type with the code `code`; None if this process has no such type."""
    return _BY_CODE.get(code)


def record_by_name(name: str) -> Record | None:
    """Return the element type with the name `name`; None if this process has no such type."""
    return _BY_NAME.get(name)


def layout_of(dtype: np.dtype[Any]) -> str:
    """Return a text that describes a dtype's layout, such as ``{mass: <f8, at: <i4[3]}``.

    A layout with padding also has the offsets: ``{mass: <f8 at 0, at: <i4[3] at 8; 24 bytes}``.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{layout_of(base)}{list(shape)}"
    if dtype.names is None:
        if dtype.type.__module__ == "ml_dtypes":
            return dtype.name
        return dtype.str.removeprefix("|")
    fields, end, is_dense = [], 0, True
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]  # type: ignore[index]  # a dtype with names also has fields
        is_dense = is_dense and offset == end
        end = offset + field.itemsize
        fields.append((name if name.isidentifier() else repr(name), layout_of(field), offset))
    if is_dense and end == dtype.itemsize:
        return f"{{{', '.join(f'{name}: {what}' for name, what, _ in fields)}}}"
    return f"{{{', '.join(f'{name}: {what} at {offset}' for name, what, offset in fields)}; {dtype.itemsize} bytes}}"
