"""Bytes to objects: msgpack builds the lists, and those that a tag heads become what the tag says."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import msgpack

from aiocoll.codec.limits import MAX_BYTES
from aiocoll.codec.records import CODES, IN_PIECES, PICKLE, PIECE, RECORDS_BY_CODE, SEQUENCES
from aiocoll.errors import SerializationError

__all__ = ["loads"]


class _Tag:
    """What a tag is while the list that it heads is being read."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


def loads(data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> Any:
    """Return the object that `dumps` made `data` from; its arrays are new and writable.

    Args:
        data: what `dumps` returned, or what a peer claims that it did.
        max_bytes: refuse more than that without reading it.
        allow_pickle: accept objects that were pickled. Only for peers that may run any code here.

    Raises:
        SerializationError: `data` is too long, pickled without `allow_pickle`, needs ml_dtypes or a time zone that is
            not there, or is nothing that `dumps` makes.
    """
    nbytes = memoryview(data).nbytes
    if nbytes > max_bytes:
        raise SerializationError(f"the object takes {nbytes} bytes, max_bytes is {max_bytes}")
    decoder = _Decoder(allow_pickle)
    try:
        obj = msgpack.unpackb(
            data,
            list_hook=decoder.list_hook,
            ext_hook=decoder.ext_hook,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            max_array_len=PIECE + 1,
            timestamp=3,  # msgpack's own extension cannot be refused: a datetime at least is a type that travels
        )
    except SerializationError:
        raise
    except Exception as error:  # hostile bytes reach many constructors; none may let its own error out
        raise SerializationError(
            f"{nbytes} bytes are no object that aiocoll sends ({type(error).__name__}: {error})"
        ) from error
    if decoder.tags:
        raise SerializationError(f"{nbytes} bytes are no object that aiocoll sends (a tag in the wrong place)")
    return obj


class _Decoder:
    """The hooks of one `loads`. `tags` counts those seen that head no list yet: none is left when all is well."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.tags = 0

    def ext_hook(self, code: int, data: bytes) -> _Tag:
        """Read a tag."""
        if data or code not in CODES:
            raise SerializationError(f"extension value of unknown type {code} with {len(data)} bytes")
        self.tags += 1
        return _Tag(code)

    def list_hook(self, items: list[Any]) -> Any:
        """Turn a list that a tag heads into what the tag says."""
        if not items or type(items[0]) is not _Tag:
            return items
        self.tags -= 1
        code = items.pop(0).code
        if sequence := SEQUENCES.get(code & ~IN_PIECES):
            if not code & IN_PIECES:
                return sequence(items)
            if not all(type(piece) is list for piece in items):
                raise SerializationError("a long sequence whose pieces are no lists")
            return sequence(chain.from_iterable(items))
        if code == PICKLE:
            return self._unpickle(items)
        fields, join = RECORDS_BY_CODE[code].fields, RECORDS_BY_CODE[code].join
        if len(items) != len(fields) or not all(map(isinstance, items, fields)):
            raise SerializationError(f"extension type {code} with the wrong fields")
        return join(*items)

    def _unpickle(self, items: list[Any]) -> Any:
        if not self._allow_pickle:
            raise SerializationError(
                "the object was pickled, and reading a pickle runs any code that it names: "
                "if every rank may be trusted with that, set allow_pickle=True on all of them"
            )
        return pickle.loads(*items)
