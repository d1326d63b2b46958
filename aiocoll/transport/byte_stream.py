"""Interface of a link's byte stream: a plain or an encrypted socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["ByteStream", "Bytes", "OpenStream", "receive_message", "resolve", "send_message"]

Bytes = bytes | bytearray | memoryview


class ByteStream(Protocol):
    """A connection that carries ordered bytes in both directions. No method blocks.

    A method that moves bytes raises `BlockingIOError` if it cannot move any now. It raises another `OSError` if the
    connection is broken. While neither `start_reading` nor `start_writing` is in effect, any thread may use the stream.
    """

    @property
    def sock(self) -> socket.socket:
        """Return the underlying socket, to set options or to query the peer, but not to transfer bytes."""

    @property
    def bound(self) -> bytes:
        """Return the bytes that a handshake must authenticate: the TLS certificate; empty without encryption."""

    def check_rank(self, rank: int) -> None:
        """Check that the peer's certificate names `rank`. Without a certificate, do nothing.

        Raises:
            WrongCertificateError: the certificate does not name that rank.
        """

    @property
    def send(self) -> Callable[[Bytes], int]:
        """Send some bytes; return how many. After `BlockingIOError`, the caller must pass the same bytes again."""

    @property
    def send_parts(self) -> Callable[[Iterable[Bytes]], int]:
        """Send bytes from several buffers in order, as `send` does from one buffer."""

    @property
    def receive_into(self) -> Callable[[memoryview], int]:
        """Receive some bytes into a buffer; return how many, or 0 if the peer has ended its sending side.

        A short result means that the rest has not arrived, or that `readable` will be called for it.
        """

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Call `readable` from the event loop repeatedly, as long as there may be bytes to receive.

        This includes bytes that have left the socket and wait in the stream. The stream also handles all that it has to
        send or await itself before it can continue, so the caller need not.
        """

    def stop_reading(self) -> None:
        """Stop calling `readable`."""

    def start_writing(self, writable: Callable[[], object]) -> None:
        """Call `writable` from the event loop repeatedly, as long as the stream accepts bytes."""

    def stop_writing(self) -> None:
        """Stop calling `writable`."""

    def shutdown(self) -> None:
        """End the sending side: the peer receives all bytes sent before, then the end. Receiving continues."""

    def close(self) -> None:
        """Close the connection; stop reading and writing. Idempotent."""


class OpenStream(Protocol):
    """A function that makes a byte stream from a socket."""

    async def __call__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> ByteStream:
        """Return the byte stream for a connected socket; on failure, close `sock`.

        Args:
            loop: the caller's loop.
            sock: a non-blocking socket.
            dialled: whether this end opened the connection.
        """


async def receive_message(stream: ByteStream, nbytes: int) -> bytes:
    """Receive a handshake message of `nbytes` bytes.

    Raises:
        OSError: the peer has closed the connection, or the connection broke.
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
            raise ConnectionResetError("the peer closed the connection during the handshake")
        message += space[:received]
    return bytes(message)


def send_message(stream: ByteStream, message: bytes) -> None:
    """Send a handshake message without waiting: the socket buffer of a new connection has space for it."""
    if stream.send(message) != len(message):
        raise ConnectionResetError("the new connection has no room for a handshake message")


async def _readable(stream: ByteStream) -> None:
    readable = asyncio.get_running_loop().create_future()
    stream.start_reading(lambda: resolve(readable))
    try:
        await readable
    finally:
        stream.stop_reading()


def resolve(future: asyncio.Future[None]) -> None:
    """Set the result of a future, unless another callback has already done that."""
    if not future.done():
        future.set_result(None)
