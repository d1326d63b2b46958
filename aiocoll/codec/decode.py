"""Decoding of objects: msgpack makes lists, and a list that starts with a tag becomes an object of the tag's type.

Even hostile input takes at most about 1 µs per byte, and `reading` decodes 1 KiB per step. Operations for which Python
would need more time are limited: comparing keys with the same hash (`keys`), and dividing large integers.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator, Iterator
from typing import Any

import msgpack

from aiocoll.codec.keys import check_keys
from aiocoll.codec.limits import MAX_BYTES
from aiocoll.codec.records import (
    CODES,
    DICT,
    FOREIGN_ARRAY,
    FROZENSET,
    HASHED_PIECE,
    IN_PIECES,
    LIST,
    PICKLE,
    PIECE,
    PIECE_CODE,
    RECORDS_BY_CODE,
    SEQUENCES,
    SET,
    RecordType,
)
from aiocoll.elements.adapters import adapters
from aiocoll.errors import SerializationError
from aiocoll.user_code import contain, describe

__all__ = ["loads", "reading"]

#: Number of bytes that `reading` decodes in one step.
_STEP = 1 << 10
#: Maximum number of characters quoted from another error's message, which may contain a key of many megabytes.
_SHOWN = 200


def loads(data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> Any:
    """Decode an object from the bytes of `dumps`. Its arrays are new and writable.

    Args:
        data: the bytes from `dumps`, or bytes received from a peer.
        max_bytes: maximum number of bytes. Longer data is rejected without being decoded.
        allow_pickle: whether to accept pickled objects. Only for peers that may run any code here.

    Raises:
        SerializationError: `data` is too long, pickled without `allow_pickle`, needs ml_dtypes or a time zone that is
            not installed, or was not made by `dumps`.
    """
    nbytes = _check_size(data, max_bytes)
    decoder = _Decoder(allow_pickle)
    with _refusing(nbytes):
        obj = msgpack.unpackb(data, **decoder.options())
        decoder.end()
    return obj


def reading(
    data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False
) -> Generator[None, None, Any]:
    """Decode an object, as `loads` does, in steps of less than 1 ms.

    Each yield ends a step. A str or bytes is decoded in one step, which takes 0.3 ms per MiB.
    """
    nbytes = _check_size(data, max_bytes)
    if nbytes <= _STEP:
        return loads(data, max_bytes=max_bytes, allow_pickle=allow_pickle)
    decoder = _Decoder(allow_pickle)
    unpacker = msgpack.Unpacker(max_buffer_size=nbytes, **decoder.options())
    whole = memoryview(data)
    for start in range(0, nbytes, _STEP):
        with _refusing(nbytes):
            unpacker.feed(whole[start : start + _STEP])
            try:
                obj = unpacker.unpack()
                break
            except msgpack.OutOfData:
                pass
        yield
    else:
        raise SerializationError(f"{nbytes} bytes are not a valid object (the data is incomplete)")
    with _refusing(nbytes):
        if unpacker.tell() < nbytes:
            raise ValueError("there is data after the end of the object")
        decoder.end()
    return obj


def _check_size(data: bytes | bytearray | memoryview, max_bytes: int) -> int:
    nbytes = memoryview(data).nbytes
    if nbytes > max_bytes:
        raise SerializationError(f"the object has {nbytes} bytes, but max_bytes is {max_bytes}")
    return nbytes


@contextlib.contextmanager
def _refusing(nbytes: int) -> Iterator[None]:
    """Convert any exception in this context to a `SerializationError`."""
    try:
        yield
    except SerializationError:
        raise
    except BaseException as error:  # hostile bytes can make many constructors raise any exception
        # Wrap a StopIteration: `contextmanager` would raise it again in place of an error that it has caused.
        contained = contain(error)
        raise SerializationError(f"{nbytes} bytes are not a valid object ({describe(error):.{_SHOWN}})") from contained


def _foreign_array(library: str, dtype: str, shape: list[Any], data: bytes) -> Any:
    """Return a new array of an array library. The arguments come from another rank, so they are not trusted."""
    if library not in adapters.names():  # a peer must not be able to trigger a search for entry points
        raise SerializationError(f"received an array of {library!r:.60}: no adapter is registered for it")
    return adapters.get(library).unpack(dtype, shape, data)


#: Maps the code of a type tag to its record type.
_RECORDS = {
    **RECORDS_BY_CODE,
    FOREIGN_ARRAY: RecordType(FOREIGN_ARRAY, (str, str, list, bytes), tuple, _foreign_array),
}
_CODES = {*CODES, FOREIGN_ARRAY}


class _Tag:
    """The state of a type tag while its list is being decoded.

    Attributes:
        code: the code of the tag.
        built: the part of a long container that has been built from its pieces; None for other kinds.
        by_hash: the keys of the container by hash, see `check_keys`.
    """

    __slots__ = ("built", "by_hash", "code")

    def __init__(self, code: int) -> None:
        self.code = code
        self.by_hash: dict[int, Any] = {}
        self.built: Any = None
        if code & IN_PIECES:
            kind = code & ~IN_PIECES
            self.built = {} if kind == DICT else set() if kind in (SET, FROZENSET) else []


class _Decoder:
    """The msgpack hooks for one call of `loads`."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._open: list[_Tag] = []

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of msgpack's `unpackb` and `Unpacker`."""
        return {
            "list_hook": self._list,
            "object_pairs_hook": self._dict,
            "ext_hook": self._tag,
            "strict_map_key": False,
            "unicode_errors": "surrogatepass",
            "max_array_len": PIECE + 1,
            "max_map_len": HASHED_PIECE,
            "timestamp": 3,  # msgpack cannot disable its timestamp extension; datetime is a supported type
        }

    def end(self) -> None:
        """Raise an error if a type tag was not the first item of a list."""
        if self._open:
            raise SerializationError("not a valid object: a type tag is not the first item of a list")

    def _tag(self, code: int, data: bytes) -> _Tag:
        if data or code not in _CODES:
            raise SerializationError(f"extension value of unknown type {code} with {len(data)} bytes")
        self._open.append(_Tag(code))
        return self._open[-1]

    def _dict(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        check_keys((key for key, _ in pairs), {})
        return dict(pairs)

    def _list(self, items: list[Any]) -> Any:
        """Convert a decoded list that starts with a type tag to the tagged object; return any other list unchanged."""
        if not items or type(items[0]) is not _Tag:
            return items
        tag = items.pop(0)
        if self._open.pop() is not tag:
            raise SerializationError("not a valid object: a type tag is not the first item of a list")
        code = tag.code
        if code == PIECE_CODE:
            return self._join_piece(items)
        if code & IN_PIECES:
            return _finish_container(tag, items)
        if sequence := SEQUENCES.get(code):
            if code in (SET, FROZENSET):
                _check_set(items, tag.by_hash)
            return sequence(items)
        if code == PICKLE:
            return self._unpickle(items)
        fields, join = _RECORDS[code].fields, _RECORDS[code].join
        if len(items) != len(fields) or not all(map(isinstance, items, fields)):
            raise SerializationError(f"not a valid object: extension type {code} has the wrong fields")
        return join(*items)

    def _join_piece(self, items: list[Any]) -> None:
        """Add one decoded piece to its long container. Adding all pieces at the end could block the event loop."""
        whole = self._open[-1] if self._open else None
        if whole is None or whole.built is None:
            raise SerializationError("not a valid object: found a piece of a long container outside of one")
        if type(whole.built) is list:
            whole.built.extend(items)
        elif type(whole.built) is set:
            _check_set(items, whole.by_hash)
            whole.built.update(items)
        else:
            if len(items) != 1 or type(items[0]) is not dict:
                raise SerializationError("a piece of a dict is not a dict")
            check_keys(items[0], whole.by_hash)
            whole.built.update(items[0])

    def _unpickle(self, items: list[Any]) -> Any:
        if not self._allow_pickle:
            raise SerializationError(
                "the object was pickled, and reading a pickle can run any code; "
                "if you trust all ranks to run any code, set allow_pickle=True on every rank"
            )
        return pickle.loads(*items)


def _finish_container(tag: _Tag, items: list[Any]) -> Any:
    """Return a long container, such as a dict, after all its pieces have been decoded."""
    if any(item is not None for item in items):
        raise SerializationError("received a long container with an item that is not a piece")
    kind = tag.code & ~IN_PIECES
    return tag.built if kind in (LIST, SET, DICT) else SEQUENCES[kind](tag.built)


def _check_set(items: list[Any], by_hash: dict[int, Any]) -> None:
    if len(items) > HASHED_PIECE:
        raise SerializationError(f"received {len(items)} elements of a set in one piece, the limit is {HASHED_PIECE}")
    check_keys(items, by_hash)
