"""Encoding of objects as bytes: msgpack with additional Python types, and without pickle.

Plain values (None, bool, int, float, str, bytes, list, dict) are encoded as in msgpack. Every other kind of value is an
array that starts with a *tag*: an empty extension value whose code is the kind:

    (1, 2)               [tag 2, 1, 2]
    uint8 array 2 x 3    [tag 5, "|u1", [2, 3], 6 bytes]
    timedelta(days=1)    [tag 19, 1, 0, 0]

A user value is never a tag, so lists need no tag. No kind is nested in the encoded bytes of another kind, so decoding
copies each byte once or twice at any depth. Only exact types are accepted, since a subclass (Counter, IntEnum, a named
tuple) would arrive as its base class. An object with two references to it arrives as two objects.

Received bytes are not trusted:

- A header may announce at most `PIECE` elements, or `HASHED_PIECE` keys, so that a false length reserves little memory.
  Longer containers are sent in pieces.
- Fields are checked before an object is built from them.
- Steps of quadratic time are limited.
- Any other failure raises a `SerializationError`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from aiocoll.codec.limits import MAX_BYTES, MAX_DEPTH
from aiocoll.loading import loading

__all__ = ["MAX_BYTES", "MAX_DEPTH", "dumps", "loads", "reading"]

# `encode` and `decode` are imported on first use, because most programs send no objects. They import decimal,
# fractions, uuid and zoneinfo, which takes 10 % of aiocoll's import time.


def dumps(obj: Any, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> bytes:
    """Encode `obj` as bytes; see `aiocoll.codec.encode.dumps`."""
    with loading("objects"):
        from aiocoll.codec import encode

    return encode.dumps(obj, max_bytes=max_bytes, allow_pickle=allow_pickle)


def loads(data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> Any:
    """Decode an object from the bytes of `dumps`; see `aiocoll.codec.decode.loads`."""
    with loading("objects"):
        from aiocoll.codec import decode

    return decode.loads(data, max_bytes=max_bytes, allow_pickle=allow_pickle)


def reading(
    data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False
) -> Generator[None, None, Any]:
    """Decode an object, as `loads` does, in short steps; see `aiocoll.codec.decode.reading`."""
    with loading("objects"):
        from aiocoll.codec import decode

    return decode.reading(data, max_bytes=max_bytes, allow_pickle=allow_pickle)
