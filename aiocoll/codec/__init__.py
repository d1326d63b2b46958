"""Objects as bytes: msgpack, extended to more Python types, without pickle.

Plain values (None, bool, int, float, str, bytes, list, dict) are themselves. Every other kind is an array that starts
with a *tag*, an empty extension value whose code names the kind:

    (1, 2)               [tag 2, 1, 2]
    uint8 array 2 x 3    [tag 5, "|u1", [2, 3], 6 bytes]
    timedelta(days=1)    [tag 19, 1, 0, 0]

No user value is ever a tag, so a list needs none, and no kind is wrapped in the bytes of another: decoding copies a
byte once or twice, however deep it lies. Types are exact or refused: a subclass (Counter, IntEnum, a named tuple)
would come back as its base. An object that can be reached in two ways arrives as two objects.

Received bytes are not trusted. A header may claim `PIECE` elements, or `HASHED_PIECE` keys (longer containers are sent
in pieces), so a false length reserves little memory; fields are checked before anything is built from them; steps of
quadratic time have a limit; and any other failure is a `SerializationError`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from aiocoll.codec.limits import MAX_BYTES, MAX_DEPTH
from aiocoll.loading import loading

__all__ = ["MAX_BYTES", "MAX_DEPTH", "dumps", "loads", "reading"]

# Loaded on first use: the supported kinds import their modules (decimal, fractions, uuid, zoneinfo), a tenth of the
# import time of aiocoll, and most programs send no objects.


def dumps(obj: Any, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> bytes:
    """Return `obj` as bytes that `loads` turns into an equal object; see `aiocoll.codec.encode.dumps`."""
    with loading("objects"):
        from aiocoll.codec import encode

    return encode.dumps(obj, max_bytes=max_bytes, allow_pickle=allow_pickle)


def loads(data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False) -> Any:
    """Return the object that `dumps` made `data` from; see `aiocoll.codec.decode.loads`."""
    with loading("objects"):
        from aiocoll.codec import decode

    return decode.loads(data, max_bytes=max_bytes, allow_pickle=allow_pickle)


def reading(
    data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_BYTES, allow_pickle: bool = False
) -> Generator[None, None, Any]:
    """Do what `loads` does in short steps; see `aiocoll.codec.decode.reading`."""
    with loading("objects"):
        from aiocoll.codec import decode

    return decode.reading(data, max_bytes=max_bytes, allow_pickle=allow_pickle)
