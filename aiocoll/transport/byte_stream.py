"""Byte stream of a link: a plain socket, or an encrypted one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["ByteStream", "Bytes", "OpenStream", "receive_message", "resolve", "send_message"]

Bytes = bytes | bytearray | memoryview


class ByteStream(Protocol):
    """A connection that carries ordered bytes in both directions. No method waits.

    A method that moves bytes raises `BlockingIOError` if it cannot move any now. It raises another `OSError` if the
    connection is broken. While neither `start_reading` nor `start_writing` is in effect, any thread may use the stream.
    """

    @property
    def sock(self) -> socket.socket:
        """Return the underlying socket, for its options and for the kernel's knowledge of the peer; not for bytes."""

    @property
    def bound(self) -> bytes:
        """Return the part of the connection that a handshake must bind: its certificate. Empty without encryption."""

    def check_rank(self, rank: int) -> None:
        """Check that the peer's certificate names `rank`; do nothing without a certificate.

        Raises:
            WrongCertificateError: the certificate does not name that rank.
        """

    @property
    def send(self) -> Callable[[Bytes], int]:
        """Send some bytes and return their number. After `BlockingIOError` the caller offers the same bytes again."""

    @property
    def send_parts(self) -> Callable[[Iterable[Bytes]], int]:
        """Send bytes as `send` does, from several buffers in order."""

    @property
    def receive_into(self) -> Callable[[memoryview], int]:
        """Receive some bytes and return their number, or 0 if the peer sends no more.

        A short result means that the rest has not arrived, or that `readable` will be called for it.
        """

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Call `readable` in the loop, again and again, while there may be bytes to receive.

        This includes bytes that have left the socket and wait in the stream. The stream also handles all that it has to
        send or await itself before it can continue, so the caller need not.
        """

    def stop_reading(self) -> None:
        """Stop calling `readable`."""

    def start_writing(self, writable: Callable[[], object]) -> None:
        """Call `writable` in the loop, again and again, while the stream can take bytes."""

    def stop_writing(self) -> None:
        """Stop calling `writable`."""

    def shutdown(self) -> None:
        """End the sending side: the peer receives the bytes sent so far, then the end. Receiving continues."""

    def close(self) -> None:
        """Close the connection; stop reading and writing. Idempotent."""


class OpenStream(Protocol):
    """A factory that makes a stream from a socket."""

    async def __call__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> ByteStream:
        """Return the stream for a connected socket; close `sock` on failure.

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
    """Send a handshake message. A new connection always has room for it."""
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
    """Resolve a future that another call may already have resolved."""
    if not future.done():
        future.set_result(None)
