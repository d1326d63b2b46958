"""What is said on a socket of `aiocoll top`: a byte that asks, and an answer with the state of all groups.

An answer is its length in four bytes, and a map in msgpack: `process`, `groups` (each in msgpack again, as bytes), and
`left_out`, how many groups did not fit. It is made anew each time; nothing is sent that nobody has asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import msgpack

from aiocoll.errors import ProtocolError

__all__ = ["ASK", "MOST", "Reader", "answer"]

ASK: Final = b"?"
#: Bytes of an answer: some hundred groups, or ten of a thousand ranks each.
MOST: Final = 256 << 10
_LENGTH: Final = struct.Struct("<I")
#: Room for what is around the groups.
_ROOM: Final = 64


def answer(process: int, groups: Iterable[dict[str, Any]]) -> bytes:
    """Return the bytes of an answer; groups that do not fit any more are counted."""
    packed: list[bytes] = []
    size = left_out = 0
    for group in groups:
        data: bytes = msgpack.packb(group)
        if size + len(data) + 8 > MOST - _ROOM:
            left_out += 1
            continue
        size += len(data) + 8
        packed.append(data)
    body: bytes = msgpack.packb({"process": process, "groups": packed, "left_out": left_out})
    return _LENGTH.pack(len(body)) + body


class Reader:
    """Finds answers in what a process has sent."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the answers that are complete with `data`.

        Raises:
            ProtocolError: it is no answer.
        """
        self._data += data
        found = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MOST:
                raise ProtocolError(f"an answer of {length} bytes: that is not aiocoll")
            if len(self._data) < _LENGTH.size + length:
                break
            body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            found.append(_parsed(body))
        return found


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        said: dict[str, Any] = msgpack.unpackb(body)
        return {**said, "groups": [msgpack.unpackb(group) for group in said["groups"]]}
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ProtocolError(f"an answer that cannot be read: {type(error).__name__}: {error}") from None
