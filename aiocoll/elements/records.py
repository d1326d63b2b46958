"""Element types that only move: structured dtypes, dates, texts and plain bytes of a fixed length.

Their arrays travel as bytes, so nothing here depends on what is in them. What the ranks agree on is the layout, written
as a text: the names, formats and offsets of all fields, byte order and padding included.
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

#: The bit that codes of layouts have, and no other code.
LAYOUT = 1 << 31
#: Characters of a layout's name. A longer one is cut, and ends with a hash of all of it.
LONGEST_NAME = 400

_UINT8 = np.dtype(np.uint8)
_KINDS = "VSUMm"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Record(DType):
    """A type whose elements are `itemsize` elements of its storage, bytes; its name tells its layout.

    Attributes:
        array: dtype of users' arrays.
    """

    array: np.dtype[Any]

    def __reduce__(self) -> tuple[Callable[[np.dtype[Any]], DType | None], tuple[np.dtype[Any]]]:
        return record, (self.array,)


# One instance per layout, for as long as anything uses it.
_BY_DTYPE: WeakValueDictionary[np.dtype[Any], Record] = WeakValueDictionary()
_BY_CODE: WeakValueDictionary[int, Record] = WeakValueDictionary()
_BY_NAME: WeakValueDictionary[str, Record] = WeakValueDictionary()
# Those that were used last stay: a message that is on its way, or is still to be posted, knows only the code.
_LATEST: OrderedDict[int, Record] = OrderedDict()
_KEPT = 256


def record(dtype: np.dtype[Any]) -> Record | None:
    """Return the type of arrays whose dtype is `dtype`; None if it is no such dtype.

    Raises:
        TypeError: its elements refer to other memory, or have no bytes.
    """
    found = _BY_DTYPE.get(dtype)
    if found is not None:
        return _keep(found)
    if dtype.hasobject:
        raise TypeError(
            f"dtype {dtype} refers to objects of this process, which cannot be sent as bytes: use a dtype without "
            "objects, or a call on objects, such as send_object"
        )
    if dtype.kind not in _KINDS or dtype.type.__module__ == "ml_dtypes":
        return None
    if not dtype.itemsize:
        raise TypeError(f"dtype {dtype} has elements of no bytes")
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
    """Return the type whose code is `code`, if this process uses it."""
    return _BY_CODE.get(code)


def record_by_name(name: str) -> Record | None:
    """Return the type called `name`, if this process uses it."""
    return _BY_NAME.get(name)


def layout_of(dtype: np.dtype[Any]) -> str:
    """Write a layout: ``{mass: <f8, at: <i4[3]}``, and with padding ``{mass: <f8 at 0, at: <i4[3] at 8; 24 bytes}``."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{layout_of(base)}{list(shape)}"
    if dtype.names is None:
        if dtype.type.__module__ == "ml_dtypes":
            return dtype.name
        return dtype.str.removeprefix("|")
    fields, end, is_dense = [], 0, True
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]  # type: ignore[index]  # there are fields where there are names
        is_dense = is_dense and offset == end
        end = offset + field.itemsize
        fields.append((name if name.isidentifier() else repr(name), layout_of(field), offset))
    if is_dense and end == dtype.itemsize:
        return f"{{{', '.join(f'{name}: {what}' for name, what, _ in fields)}}}"
    return f"{{{', '.join(f'{name}: {what} at {offset}' for name, what, offset in fields)}; {dtype.itemsize} bytes}}"
