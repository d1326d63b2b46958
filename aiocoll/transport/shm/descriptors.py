"""Descriptors that come over a unix socket."""

from __future__ import annotations

import array
import os
import socket

from aiocoll.errors import ProtocolError

__all__ = ["check_eventfd", "recv_fds"]


def recv_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """As `socket.recv_fds`, but no child process inherits the descriptors."""
    space = socket.CMSG_LEN(most * array.array("i").itemsize) if most else 0
    data, ancillary, _, _ = sock.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def check_eventfd(fd: int) -> None:
    """Refuse what could block who writes to it.

    That it does not block is a property that all who hold it share: the peer alone makes it so, before it passes it.

    Raises:
        ProtocolError: it is something else, or blocks.
        OSError: it cannot be known, without /proc.
    """
    kind = os.readlink(f"/proc/self/fd/{fd}")
    if kind != "anon_inode:[eventfd]":
        raise ProtocolError(f"a peer passed {kind} where an eventfd belongs")
    if os.get_blocking(fd):
        raise ProtocolError("a peer passed an eventfd that blocks")
