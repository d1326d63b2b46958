"""A store connection without sockets, and hypothesis strategies for its messages."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
from hypothesis import strategies as st

keys = st.sampled_from(["a", "b", "n", "ü", "", "x" * 1024, "x" * 1025, "\udc80"])
values = st.sampled_from([b"", b"1", b"12", b"value", b"9" * 5000, bytes(100_000)])
amounts = st.sampled_from([0, 1, -1, (1 << 63) - 1, 1 << 63, True])
#: Garbage bytes to insert between two messages; mostly no bytes.
garbled = st.one_of(st.just(b""), st.just(b""), st.binary(max_size=20))


def framed(message: Any) -> bytes:
    """Return a message as a frame, or b"" if msgpack cannot encode it."""
    try:
        body = msgpack.packb(message, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, TypeError):
        return b""
    return struct.pack("!I", len(body)) + body


class Wire:
    """A fake asyncio transport that keeps the written data."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True

    close = abort

    def messages(self) -> list[Any]:
        found, at = [], 0
        while at < len(self.written):
            (nbytes,) = struct.unpack_from("!I", self.written, at)
            found.append(msgpack.unpackb(self.written[at + 4 : at + 4 + nbytes]))
            at += 4 + nbytes
        return found


def feed(connection: Any, wire: Wire, data: bytes) -> None:
    """Pass bytes to a `BufferedProtocol` as the event loop would, until the connection closes."""
    while data and not wire.is_closing():
        room = connection.get_buffer(-1)
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        data = data[taken:]
        connection.buffer_updated(taken)
