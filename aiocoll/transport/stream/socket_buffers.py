"""How much the kernel may hold of what goes through a socket."""

from __future__ import annotations

import socket

from aiocoll.sockets import between_hosts
from aiocoll.transport.frame import SEGMENT

__all__ = ["LOOPBACK_BUFFER", "UNIX_BUFFER", "size_buffers"]

#: Bytes the kernel may hold in each direction on one host: some segments, so that sender and receiver overlap without
#: a wake-up per segment, and not so many that the bytes leave the cache before they are read. Measured from 128 KiB to
#: 4 MiB: TCP counts its own overhead, and acknowledges, so it needs more. Between hosts the kernel tunes by itself.
UNIX_BUFFER = 2 * SEGMENT
LOOPBACK_BUFFER = 8 * SEGMENT


def size_buffers(sock: socket.socket) -> None:
    """Size the buffers of a connection inside a host."""
    if sock.family == socket.AF_UNIX:
        nbytes = UNIX_BUFFER
    elif between_hosts(sock):
        return
    else:
        nbytes = LOOPBACK_BUFFER
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
