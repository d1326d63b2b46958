"""Framing of messages on store connections, for both ends.

    frame    length u32 (big endian, 1 to 16 MiB), then one msgpack value
    request  [id, command, arguments]; "cancel" ends the wait with the same id, and its reply is then MISSING
    reply    [id, ReplyStatus, payload]; the payload is the result, an error text, or the missing keys of a wait

Requests have an id, so a wait does not block later requests.
"""

from __future__ import annotations

import asyncio
import struct
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

import msgpack

from aiocoll.errors import AuthenticationError, ProtocolError, StoreError
from aiocoll.store.commands import MAX_ENTRIES, MAX_VALUE_BYTES

__all__ = ["FrameProtocol", "pack"]

#: Maximum bytes of a frame: two values of the maximum size. Decoding takes at most about 70 times as much memory.
MAX_FRAME = 16 << 20
#: Bytes of the first buffer for a frame. The buffer is doubled when it is full, so a false length costs no memory.
_FIRST_BLOCK = 64 << 10
_LENGTH = struct.Struct("!I")


def pack(message: list[Any]) -> bytes:
    """Return `message` as a frame; raise `StoreError` if it is too long."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME:
        raise StoreError(f"{len(body)} bytes in one command or reply, the limit is {MAX_FRAME}: use fewer keys at once")
    return _LENGTH.pack(len(body)) + body


class FrameProtocol(asyncio.BufferedProtocol):
    """A connection that receives blocks of known sizes, and allocates their memory only as bytes arrive."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._block = bytearray()
        self._nbytes = 0
        self._filled = 0
        self._handler: Callable[[bytearray], None] = self._length_received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport in the attribute `transport`."""
        # No isinstance check, because uvloop's transports have the methods of the base class but do not derive from it.
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the rest of the current block."""
        return memoryview(self._block)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the current block when it is complete. An invalid block ends only this connection."""
        self._filled += nbytes
        if self._filled < len(self._block):
            return
        try:
            if self._filled < self._nbytes:
                # Allocate a new buffer, because asyncio still holds a view of the old one.
                larger = bytearray(min(2 * self._filled, self._nbytes))
                larger[: self._filled] = self._block
                self._block = larger
            else:
                self._handler(self._block)
        except (AuthenticationError, ProtocolError) as exc:
            self.record_failure(exc)
            self.transport.abort()
        except Exception as exc:
            self.record_failure(ProtocolError(f"handling the received bytes failed: {exc!r}"))
            self.transport.abort()

    def received_so_far(self) -> bytes:
        """Return the received bytes of the current, incomplete block."""
        return bytes(self._block[: self._filled])

    def _expect(self, nbytes: int, handler: Callable[[bytearray], None]) -> None:
        self._block = bytearray(min(nbytes, _FIRST_BLOCK))
        self._nbytes = nbytes
        self._filled = 0
        self._handler = handler

    def _expect_frame(self) -> None:
        self._expect(_LENGTH.size, self._length_received)

    def _length_received(self, block: bytearray) -> None:
        (nbytes,) = _LENGTH.unpack(block)
        if not 0 < nbytes <= MAX_FRAME:
            raise ProtocolError(f"received a store frame of {nbytes} bytes; the limit is {MAX_FRAME}")
        self._expect(nbytes, self._body_received)

    def _body_received(self, block: bytearray) -> None:
        try:
            message = msgpack.unpackb(
                block,
                max_str_len=len(block),
                max_bin_len=MAX_VALUE_BYTES,
                max_array_len=MAX_ENTRIES,
                max_map_len=0,
                max_ext_len=0,
            )
        except ValueError as exc:
            raise ProtocolError(f"received a store frame that cannot be decoded: {exc}") from exc
        if not isinstance(message, list) or len(message) != 3 or type(message[0]) is not int:
            raise ProtocolError("received a store frame that is neither a request nor a reply")
        self._expect_frame()
        self.message_received(*message)

    @abstractmethod
    def message_received(self, number: int, word: Any, payload: Any) -> None:
        """Handle a decoded message. If this raises `ProtocolError`, the connection is closed."""

    @abstractmethod
    def record_failure(self, exc: Exception) -> None:
        """Record why the connection is about to be aborted."""
