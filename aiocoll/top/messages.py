"""Messages of `aiocoll top`: a request of one byte, and an answer with the state of all groups.

An answer is a length in four bytes and a msgpack map: `process`, `groups` (each packed with msgpack, as bytes) and
`left_out`, the number of groups that did not fit. It is made from the current state per request. A process sends
nothing without a request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import msgpack

from aiocoll.errors import ProtocolError

__all__ = ["ASK", "MOST", "Reader", "answer"]

ASK: Final = b"?"
#: Maximum size of an answer in bytes: enough for about a hundred groups, or ten groups of a thousand ranks each.
MOST: Final = 256 << 10
_LENGTH: Final = struct.Struct("<I")
#: Bytes of an answer that are reserved for all fields except the groups.
_HEADER_ROOM: Final = 64


def answer(process: int, groups: Iterable[dict[str, Any]]) -> bytes:
    """Encode an answer with the state of all groups; groups that do not fit are left out and counted."""
    packed: list[bytes] = []
    size = left_out = 0
    for group in groups:
        data: bytes = msgpack.packb(group)
        if size + len(data) + 8 > MOST - _HEADER_ROOM:
            left_out += 1
            continue
        size += len(data) + 8
        packed.append(data)
    body: bytes = msgpack.packb({"process": process, "groups": packed, "left_out": left_out})
    return _LENGTH.pack(len(body)) + body


class Reader:
    """A parser that splits a stream of received bytes into answers."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add received bytes to the stream, and return all answers that are now complete.

        Raises:
            ProtocolError: the bytes are not an answer.
        """
        self._data += data
        found = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MOST:
                raise ProtocolError(
                    f"received an answer of {length} bytes, but the limit is {MOST}: the sender is not aiocoll"
                )
            if len(self._data) < _LENGTH.size + length:
                break
            body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            found.append(_parse(body))
        return found


def _parse(body: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = msgpack.unpackb(body)
        return {**fields, "groups": [msgpack.unpackb(group) for group in fields["groups"]]}
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ProtocolError(f"received an answer that cannot be parsed: {type(error).__name__}: {error}") from None
