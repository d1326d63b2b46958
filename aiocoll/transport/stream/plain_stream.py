"""A byte stream that is a socket and nothing else."""

from __future__ import annotations

import asyncio
import socket

from aiocoll.transport.stream.socket_stream import SocketStream

__all__ = ["PlainStream", "open_plain"]


class PlainStream(SocketStream):
    """See `aiocoll.transport.byte_stream.ByteStream`.

    Args:
        loop: whose readers and writers there will be.
        sock: connected and non-blocking; closed by `close`.
    """

    bound = b""

    __slots__ = ("receive_into", "send", "send_parts")

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        # The socket's own methods: none of ours is called per message.
        self.send, self.send_parts, self.receive_into = sock.send, sock.sendmsg, sock.recv_into

    def check_rank(self, rank: int) -> None:
        """Nothing was shown."""

    def shutdown(self) -> None:
        """Shut down the sending side."""
        self.sock.shutdown(socket.SHUT_WR)


async def open_plain(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> PlainStream:
    """Return a stream without encryption; see `aiocoll.transport.byte_stream.OpenStream`."""
    return PlainStream(loop, sock)
