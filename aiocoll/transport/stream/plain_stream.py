"""Byte streams on a socket: the common base class, and the stream without encryption."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

__all__ = ["PlainStream", "SocketStream", "open_plain"]


class SocketStream:
    """The base class of byte streams on a socket, without methods to send and receive.

    Args:
        loop: the event loop that watches the socket.
        sock: a connected, non-blocking socket; `close` closes it.
    """

    __slots__ = ("_loop", "_reading", "_writing", "sock")

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = loop
        self._reading = self._writing = False

    def start_reading(self, readable: Callable[[], object]) -> None:
        """Call `readable` whenever there is data to receive."""
        self._reading = True
        self._loop.add_reader(self.sock.fileno(), readable)

    def stop_reading(self) -> None:
        """Stop calling `readable`."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.sock.fileno())

    def start_writing(self, writable: Callable[[], object]) -> None:
        """Call `writable` whenever the socket accepts data; never if the loop is closed."""
        if not self._loop.is_closed():
            self._writing = True
            self._loop.add_writer(self.sock.fileno(), writable)

    def stop_writing(self) -> None:
        """Stop calling `writable`."""
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.sock.fileno())

    def close(self) -> None:
        """Close the socket."""
        if self.sock.fileno() >= 0:  # otherwise garbage collection has closed the socket before this stream
            self.stop_reading()
            self.stop_writing()
        self.sock.close()


class PlainStream(SocketStream):
    """A byte stream without encryption; see `aiocoll.transport.byte_stream.ByteStream`.

    Args:
        loop: the event loop that watches the socket.
        sock: a connected, non-blocking socket; `close` closes it.
    """

    bound = b""

    __slots__ = ("receive_into", "send", "send_parts")

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        # hot path: these are the socket's own methods, so that no Python function is called per message.
        self.send, self.send_parts, self.receive_into = sock.send, sock.sendmsg, sock.recv_into

    def check_rank(self, rank: int) -> None:
        """Do nothing, because there is no certificate to check."""

    def shutdown(self) -> None:
        """Shut down the sending side."""
        self.sock.shutdown(socket.SHUT_WR)


async def open_plain(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> PlainStream:
    """Return a byte stream without encryption; see `aiocoll.transport.byte_stream.OpenStream`."""
    return PlainStream(loop, sock)
