"""Encoding of objects in one traversal, which also finds the path of any value that cannot be sent."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgpack
import numpy as np

from aiocoll.codec.keys import check_keys
from aiocoll.codec.limits import MAX_BYTES, MAX_DEPTH
from aiocoll.codec.records import (
    ARRAY,
    BIG_INT,
    DICT,
    FOREIGN_ARRAY,
    HASHED_PIECE,
    IN_PIECES,
    LIST,
    MAX_BIN,
    ORDERED,
    PICKLE,
    PIECE,
    PIECE_CODE,
    PLAIN,
    RECORDS,
    SCALAR,
    SEQUENCE_CODES,
    TUPLE,
    RefusedError,
    dtype_text,
)
from aiocoll.elements.adapters import adapter_of_type
from aiocoll.errors import SerializationError
from aiocoll.user_code import contain, describe

__all__ = ["dumps"]


def dumps(obj: Any, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> bytes:
    """Encode `obj` as bytes, from which `loads` makes an equal object of exactly the same types.

    These types are supported:

    - None, bool, int of any size, float, complex, str, bytes, bytearray;
    - list, tuple, dict, OrderedDict, set and frozenset of supported objects;
    - range, slice, datetime, date, time, timedelta, timezone, ZoneInfo, Decimal, Fraction, UUID;
    - NumPy arrays and scalars of every dtype, including those of ml_dtypes, except objects, structures and times
    without
      a unit;
    - dense torch tensors on the CPU, without gradients.

    Arrays arrive in C order. Of two C types with the same width, such as long and long long, NumPy's default arrives.

    Args:
        obj: the object to send.
        max_bytes: maximum number of bytes. A larger object is rejected.
        allow_pickle: whether to pickle unsupported objects. The receiver must also allow it, and then runs any code
            that the bytes name.

    Raises:
        SerializationError: a part of `obj` cannot be sent (the message names its type and path), containers are nested
            deeper than 256, or there are more than `max_bytes` bytes.

    Cost: lists and dicts of plain values at msgpack's speed, about 1 µs for any other value, two copies of an array.
    """
    encoder = _Encoder(min(max_bytes, MAX_BIN), allow_pickle)
    try:
        encoder.put(obj, 0)
    except RefusedError as refusal:
        steps = refusal.path[::-1]
        path = "".join(steps if len(steps) <= 16 else [*steps[:12], f"... ({len(steps)} levels)"])
        raise SerializationError(f"cannot send obj{path}: {refusal}") from refusal.__cause__
    except RecursionError:
        raise SerializationError("cannot send obj: it is nested too deeply for the remaining Python stack") from None
    return b"".join(encoder.chunks)


class _Encoder:
    """The encoder of one object. It collects the encoded bytes in the list `chunks`."""

    def __init__(self, limit: int, allow_pickle: bool) -> None:
        self.chunks: list[bytes | memoryview] = []
        self._allow_pickle = allow_pickle
        self._limit = limit
        self._size = 0
        packer = msgpack.Packer(unicode_errors="surrogatepass")
        self._pack: Callable[[Any], bytes] = packer.pack
        self._array_header: Callable[[int], bytes] = packer.pack_array_header
        self._map_header: Callable[[int], bytes] = packer.pack_map_header

    def put(self, obj: Any, depth: int) -> None:
        """Encode `obj`, which is nested in `depth` containers, and append its bytes to `chunks`."""
        kind = type(obj)
        if kind in PLAIN:
            self._put_plain(obj)
        elif depth == MAX_DEPTH:
            raise RefusedError(f"containers are nested deeper than {MAX_DEPTH}; check for one that contains itself")
        elif code := SEQUENCE_CODES.get(kind):
            self._put_sequence(code, obj if kind is list else list(obj), depth)
        elif kind is dict:
            self._put_dict(obj, depth)
        elif kind is OrderedDict:
            self._head(ORDERED, 1)
            self._put_in(obj, depth)
        elif record := RECORDS.get(kind):
            self._head(record.code, len(record.fields))
            for field in record.split(obj):
                self.put(field, depth + 1)
        elif kind is np.ndarray and (dtype := dtype_text(obj.dtype)):
            self._put_array(dtype, obj)
        elif isinstance(obj, np.generic) and (dtype := dtype_text(obj.dtype)):
            self._head(SCALAR, 2)
            self._emit(self._pack(dtype) + self._pack(np.asarray(obj).tobytes()))
        elif (adapter := adapter_of_type(kind)) is not None and (parts := adapter.pack(obj)) is not None:
            self._begin_array(FOREIGN_ARRAY, *parts, library=adapter.library)
            if parts[2]:
                self._emit(adapter.content(obj))
        elif self._allow_pickle:
            self._put_pickle(obj)
        else:
            raise RefusedError(_explain_unsupported(obj))

    def _emit(self, piece: bytes | memoryview) -> None:
        self._reserve(len(piece))
        self.chunks.append(piece)

    def _reserve(self, nbytes: int) -> None:
        self._size += nbytes
        if self._size > self._limit:
            raise SerializationError(
                f"the object has at least {self._size} bytes, but max_bytes is {self._limit}; send large arrays by the "
                "collectives on arrays, which have no limit, and the rest in parts"
            )

    def _head(self, code: int, count: int) -> None:
        """Append the header of a msgpack array of `count` elements with the type tag `code`; LIST means no tag."""
        if code == LIST:
            self._emit(self._array_header(count))
        else:
            self._emit(self._array_header(count + 1) + b"\xc7\x00" + bytes((code,)))

    def _put_plain(self, obj: Any) -> None:
        if isinstance(obj, str | bytes) and len(obj) > self._limit:
            self._reserve(len(obj))
        try:
            self._emit(self._pack(obj))
        except OverflowError:
            self._head(BIG_INT, 1)
            # One bit is for the sign: -2**63 and 2**63-1 both need 8 bytes.
            self._emit(self._pack(obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True)))

    def _try_pack(self, container: list[Any] | dict[Any, Any]) -> bytes | None:
        """Encode a container of basic types by one msgpack call; return None if an int is too large for msgpack."""
        try:
            return self._pack(container)
        except (OverflowError, ValueError):
            return None

    def _put_sequence(self, code: int, items: list[Any], depth: int) -> None:
        piece = PIECE
        if code > TUPLE:
            check_keys(items, {})
            piece = HASHED_PIECE
        if len(items) <= piece:
            self._head(code, len(items))
            self._put_items(code, items, depth, 0)
            return
        starts = range(0, len(items), piece)
        self._head(code | IN_PIECES, len(starts))
        for start in starts:
            part = items[start : start + piece]
            self._head(PIECE_CODE, len(part))
            self._put_items(code, part, depth, start)

    def _put_items(self, code: int, items: list[Any], depth: int, first: int) -> None:
        if PLAIN.issuperset(map(type, items)) and (packed := self._try_pack(items)) is not None:
            self._emit(memoryview(packed)[len(self._array_header(len(items))) :])
            return
        for index, item in enumerate(items, first):
            try:
                self.put(item, depth + 1)
            except RefusedError as refusal:
                refusal.path.append(f"[{index}]" if code <= TUPLE else "{...}")
                raise

    def _put_dict(self, items: dict[Any, Any], depth: int) -> None:
        check_keys(items, {})
        if len(items) <= HASHED_PIECE:
            self._put_map(items, depth)
            return
        self._head(DICT | IN_PIECES, -(-len(items) // HASHED_PIECE))
        pairs = iter(items.items())
        while part := dict(islice(pairs, HASHED_PIECE)):
            self._head(PIECE_CODE, 1)
            self._put_map(part, depth)

    def _put_in(self, items: OrderedDict[Any, Any], depth: int) -> None:
        if depth + 1 == MAX_DEPTH:
            raise RefusedError(f"containers are nested deeper than {MAX_DEPTH}; check for one that contains itself")
        self._put_dict(items, depth + 1)

    def _put_map(self, items: dict[Any, Any], depth: int) -> None:
        plain = PLAIN.issuperset(map(type, items)) and PLAIN.issuperset(map(type, items.values()))
        if plain and (packed := self._try_pack(items)) is not None:
            self._emit(packed)
            return
        self._emit(self._map_header(len(items)))
        for key, value in items.items():
            try:
                self.put(key, depth + 1)
            except RefusedError as refusal:
                refusal.path.append(f".keys()[{_shorten_key(key)}]")
                raise
            try:
                self.put(value, depth + 1)
            except RefusedError as refusal:
                refusal.path.append(f"[{_shorten_key(key)}]")
                raise

    def _put_array(self, dtype: str, array: np.ndarray[Any, Any]) -> None:
        self._begin_array(ARRAY, dtype, array.shape, array.nbytes)
        if array.nbytes:
            self._emit(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _begin_array(self, code: int, dtype: str, shape: Sequence[int], nbytes: int, library: str = "") -> None:
        self._head(code, 4 if library else 3)
        if library:
            self._emit(self._pack(library))
        self._reserve(nbytes)  # check the size before the copy that a strided array needs
        self._size -= nbytes
        self._emit(self._pack(dtype) + self._pack(shape) + struct.pack(">BI", 0xC6, nbytes))

    def _put_pickle(self, obj: Any) -> None:
        try:
            data = pickle.dumps(obj, protocol=5)
        except BaseException as error:  # a user's class may raise any exception
            raise RefusedError(f"pickle cannot encode {_type_name(obj)}: {describe(error)}") from contain(error)
        self._head(PICKLE, 1)
        self._emit(self._pack(data))


def _shorten_key(key: Any) -> str:
    return f"{key!r:.60}" if type(key) in PLAIN else f"<{_type_name(key)}>"


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _explain_unsupported(obj: Any) -> str:
    name = _type_name(obj)
    if type(obj) is np.ndarray or isinstance(obj, np.generic):
        return f"{name} has unsupported dtype {obj.dtype}: use one without objects and fields, and with a time unit"
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return f"{name} is a named tuple and would arrive as a tuple: send tuple(x) or x._asdict()"
    for base in type(obj).__mro__:
        if (
            base in PLAIN
            or base in (dict, OrderedDict)
            or base in SEQUENCE_CODES
            or base in RECORDS
            or base is np.ndarray
        ):
            return f"{name} is a subclass of {base.__name__} and would arrive as one: convert it first"
    return f"{name} is not supported: convert it to builtins or NumPy arrays, or set allow_pickle=True on every rank"
