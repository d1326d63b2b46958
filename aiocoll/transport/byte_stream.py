"""The byte stream under a link: a plain socket, or one with encryption on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["ByteStream", "Bytes", "OpenStream", "receive_message", "resolve", "send_message"]

Bytes = bytes | bytearray | memoryview


class ByteStream(Protocol):
    """A connection that carries bytes, in order, in both directions; no call waits.

    What moves bytes raises `BlockingIOError` if nothing can be moved now, and another `OSError` if the connection is
    broken. As long as neither `start_reading` nor `start_writing` is in effect, a stream may be used in any thread.
    """

    @property
    def sock(self) -> socket.socket:
        """The underlying socket, for its options and for what the kernel knows of the other end; not for bytes."""

    @property
    def bound(self) -> bytes:
        """What a handshake must bind of this connection: which certificate secures it; nothing without encryption."""

    def check_rank(self, rank: int) -> None:
        """Compare the certificate that the other end has shown with the rank it has to be; nothing without one.

        Raises:
            WrongCertificateError: it does not name that rank.
        """

    @property
    def send(self) -> Callable[[Bytes], int]:
        """Send some bytes; return how many were taken. After `BlockingIOError` the same bytes are offered again."""

    @property
    def send_parts(self) -> Callable[[Iterable[Bytes]], int]:
        """As `send`, for several buffers in order."""

    @property
    def receive_into(self) -> Callable[[memoryview], int]:
        """Receive some bytes; return how many, 0 if the other end sends no more.

        If there are fewer than there is room for, the rest has not come, or `readable` will be called for it.
        """

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Have `readable` called in the loop, again and again while there may be something to receive.

        Bytes that have left the socket and wait in the stream count, and so does what the stream has to send, or to
        await, before it can go on: whatever it is, nobody else has to think of it.
        """

    def stop_reading(self) -> None:
        """Call `readable` no more."""

    def start_writing(self, writable: Callable[[], object]) -> None:
        """Have `writable` called in the loop, again and again while bytes would be taken."""

    def stop_writing(self) -> None:
        """Call `writable` no more."""

    def shutdown(self) -> None:
        """Let the other end receive what was sent, and then the end; receiving goes on."""

    def close(self) -> None:
        """Close the connection, and stop reading and writing. Idempotent."""


class OpenStream(Protocol):
    """Makes a stream of a socket."""

    async def __call__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> ByteStream:
        """Return the stream through which the ends of a connected socket will speak; if that fails, close `sock`.

        Args:
            loop: of the caller.
            sock: non-blocking.
            dialled: this end has opened the connection.
        """


async def receive_message(stream: ByteStream, nbytes: int) -> bytes:
    """Receive a handshake message of `nbytes` bytes.

    Raises:
        OSError: the other end has closed the connection, or it broke.
    """
    message = bytearray()
    while len(message) < nbytes:
        space = memoryview(bytearray(nbytes - len(message)))
        try:
            received = stream.receive_into(space)
        except BlockingIOError:
            await _readable(stream)
            continue
        if not received:
            raise ConnectionResetError("it closed the connection during the handshake")
        message += space[:received]
    return bytes(message)


def send_message(stream: ByteStream, message: bytes) -> None:
    """Send a handshake message, for which a connection that has just been made always has room."""
    if stream.send(message) != len(message):
        raise ConnectionResetError("it takes no bytes")


async def _readable(stream: ByteStream) -> None:
    readable = asyncio.get_running_loop().create_future()
    stream.start_reading(lambda: resolve(readable))
    try:
        await readable
    finally:
        stream.stop_reading()


def resolve(future: asyncio.Future[None]) -> None:
    """End the wait for a future; a poller may do so again and again."""
    if not future.done():
        future.set_result(None)
