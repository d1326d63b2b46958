"""Object types that can be encoded, with functions that split an object into fields and join the fields."""

from __future__ import annotations

import datetime as dt
import re
import sys
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from aiocoll.errors import SerializationError

__all__ = [
    "ARRAY",
    "BIG_INT",
    "CODES",
    "DICT",
    "FOREIGN_ARRAY",
    "FROZENSET",
    "HASHED_PIECE",
    "IN_PIECES",
    "LIST",
    "MAX_BIN",
    "ORDERED",
    "PICKLE",
    "PIECE",
    "PIECE_CODE",
    "PLAIN",
    "RECORDS",
    "RECORDS_BY_CODE",
    "SCALAR",
    "SEQUENCES",
    "SEQUENCE_CODES",
    "SET",
    "TUPLE",
    "RecordType",
    "RefusedError",
    "dtype_text",
]

#: Maximum number of elements of one msgpack array. For each array header, msgpack reserves 8 bytes per announced
#: element. For 1024 nested headers, the maximum, this is 256 MiB of address space, to which msgpack does not write.
PIECE = 1 << 15
#: Maximum number of keys in one encoded dict, or of elements in one encoded set. Hashing and comparing them takes 0.1
#: ms.
HASHED_PIECE = 1 << 8
#: Maximum length in bytes that a msgpack header can announce.
MAX_BIN = (1 << 32) - 1
#: Maximum number of bits of an int in a Fraction or a range. Their constructors divide the ints, which takes quadratic
#: time and cannot be interrupted.
_MAX_DIVISOR = 1 << 13
#: Maximum number of dimensions of an array, in any NumPy version.
_MAX_NDIM = 64

#: Types that msgpack supports, without their subclasses.
PLAIN = frozenset({type(None), bool, int, float, str, bytes})

LIST, TUPLE, SET, FROZENSET, ARRAY, SCALAR, BIG_INT, PICKLE = 1, 2, 3, 4, 5, 6, 7, 8
SEQUENCES: Mapping[int, Callable[[Iterable[Any]], Any]] = {
    LIST: list,
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
}
SEQUENCE_CODES: Mapping[Any, int] = {kind: code for code, kind in SEQUENCES.items()}
#: Tag of a dict with more than `HASHED_PIECE` keys. A shorter dict is a msgpack map.
DICT = 9
#: Tag of an array of a library with an adapter: library, dtype, shape, bytes.
FOREIGN_ARRAY = 25
#: Tag of an OrderedDict: its items, as a dict.
ORDERED = 26
#: Tag of a piece: some of the elements, or a dict with some of the items, of a long container.
PIECE_CODE = 63
#: Flag in the tag of a long container, which is sent in pieces.
IN_PIECES = 64

#: The forms of `dtype.str` of dtypes without pointers or fields: bool, integers, floats, complex, text, bytes, times.
_DTYPE = re.compile(r"[<>|]([biufcSU]\d+|[mM]8\[\w+\])")
_ML_DTYPE = re.compile(r"ml_dtypes\.(bfloat16|b?complex32|u?int[124]|float[468]_\w+)")


class RecordType(NamedTuple):
    """A type whose objects are sent as a fixed number of fields, each of a given type."""

    code: int
    fields: tuple[type, ...]
    split: Callable[[Any], Sequence[Any]]
    join: Callable[..., Any]


class RefusedError(Exception):
    """Raised when a value inside an object cannot be sent. Callers extend its `path` while it propagates."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []


def _split_timezone(zone: dt.timezone) -> tuple[dt.timedelta, str | None]:
    offset, name = zone.utcoffset(None), zone.tzname(None)
    return offset, None if name == dt.timezone(offset).tzname(None) else name


def _join_timezone(offset: dt.timedelta, name: str | None) -> dt.timezone:
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _split_zone(zone: zoneinfo.ZoneInfo) -> tuple[str]:
    if zone.key is None:
        raise RefusedError("a ZoneInfo without a key cannot be sent; use ZoneInfo(key)")
    return (zone.key,)


def _divisible(*numbers: int) -> tuple[int, ...]:
    if max(number.bit_length() for number in numbers) > _MAX_DIVISOR:
        raise RefusedError(f"a range or Fraction has an integer of over {_MAX_DIVISOR} bits, which is not supported")
    return numbers


def _join_range(*numbers: int) -> range:
    return range(*_divisible(*numbers))


def _join_fraction(*numbers: int) -> Fraction:
    return Fraction(*_divisible(*numbers))


def _split_clock(t: dt.datetime | dt.time) -> tuple[Any, ...]:
    return t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold


def _join_time(hour: int, minute: int, second: int, microsecond: int, zone: dt.tzinfo | None, fold: int) -> dt.time:
    return dt.time(hour, minute, second, microsecond, zone, fold=fold)


def _join_datetime(year: int, month: int, day: int, *clock: Any) -> dt.datetime:
    return dt.datetime.combine(dt.date(year, month, day), _join_time(*clock))


def _join_array(dtype: str, shape: list[Any], data: bytes) -> Any:
    kind = _parse_dtype(dtype)
    if len(shape) > _MAX_NDIM or not all(type(n) is int and 0 <= n <= sys.maxsize for n in shape):
        raise SerializationError(f"{shape!r:.80} is not the shape of an array")
    if prod(shape) * kind.itemsize != len(data):
        raise SerializationError(f"an array of shape {shape} and dtype {kind} does not have {len(data)} bytes")
    return np.ndarray(shape, kind, data).copy()


def _join_scalar(dtype: str, data: bytes) -> Any:
    return _join_array(dtype, [], data)[()]


_CLOCK = (int, int, int, int, object, int)
RECORDS: Mapping[type, RecordType] = {
    complex: RecordType(10, (float, float), lambda c: (c.real, c.imag), complex),
    bytearray: RecordType(11, (bytes,), lambda b: (bytes(b),), bytearray),
    range: RecordType(12, (int, int, int), lambda r: _divisible(r.start, r.stop, r.step), _join_range),
    slice: RecordType(13, (object, object, object), lambda s: (s.start, s.stop, s.step), slice),
    UUID: RecordType(14, (bytes,), lambda u: (u.bytes,), lambda b: UUID(bytes=b)),
    Decimal: RecordType(15, (str,), lambda d: (str(d),), Decimal),
    Fraction: RecordType(16, (int, int), lambda f: _divisible(f.numerator, f.denominator), _join_fraction),
    np.str_: RecordType(17, (str,), lambda s: (str.__str__(s),), np.str_),
    np.bytes_: RecordType(18, (bytes,), lambda b: (bytes(b),), np.bytes_),
    dt.timedelta: RecordType(19, (int, int, int), lambda d: (d.days, d.seconds, d.microseconds), dt.timedelta),
    dt.date: RecordType(20, (int, int, int), lambda d: (d.year, d.month, d.day), dt.date),
    dt.time: RecordType(21, _CLOCK, _split_clock, _join_time),
    dt.datetime: RecordType(
        22, (int, int, int, *_CLOCK), lambda t: (t.year, t.month, t.day, *_split_clock(t)), _join_datetime
    ),
    dt.timezone: RecordType(23, (dt.timedelta, object), _split_timezone, _join_timezone),
    zoneinfo.ZoneInfo: RecordType(24, (str,), _split_zone, zoneinfo.ZoneInfo),
}
RECORDS_BY_CODE: Mapping[int, RecordType] = {
    **{record.code: record for record in RECORDS.values()},
    ARRAY: RecordType(ARRAY, (str, list, bytes), tuple, _join_array),
    SCALAR: RecordType(SCALAR, (str, bytes), tuple, _join_scalar),
    BIG_INT: RecordType(BIG_INT, (bytes,), tuple, lambda b: int.from_bytes(b, "big", signed=True)),
    ORDERED: RecordType(ORDERED, (dict,), tuple, OrderedDict),
}
CODES = frozenset(
    {*SEQUENCES, *(code | IN_PIECES for code in (*SEQUENCES, DICT)), *RECORDS_BY_CODE, PICKLE, PIECE_CODE}
)


def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Return the name of `dtype` in encoded objects, or None if its arrays cannot be sent."""
    if dtype.type.__module__ == "ml_dtypes":
        name = f"ml_dtypes.{dtype.name}"
        return name if _ML_DTYPE.fullmatch(name) else None
    return dtype.str if _DTYPE.fullmatch(dtype.str) else None


def _parse_dtype(text: str) -> np.dtype[Any]:
    if match := _ML_DTYPE.fullmatch(text):
        try:
            import ml_dtypes
        except ImportError:
            raise SerializationError(
                f"received an array of {text}; to receive it, pip install 'aiocoll[dtypes]'"
            ) from None
        parsed: np.dtype[Any] = np.dtype(getattr(ml_dtypes, match[1]))
    elif _DTYPE.fullmatch(text):
        parsed = np.dtype(text)
    else:
        raise SerializationError(f"{text!r:.60} is not a supported dtype")
    return parsed
