"""Receiving of file descriptors from a peer over a unix socket, and checks of these descriptors."""

from __future__ import annotations

import array
import os
import socket

from aiocoll.errors import ProtocolError

__all__ = ["check_eventfd", "recv_fds"]


def recv_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Receive data and at most `most` descriptors, like `socket.recv_fds`; child processes do not inherit them."""
    space = socket.CMSG_LEN(most * array.array("i").itemsize) if most else 0
    data, ancillary, _, _ = sock.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def check_eventfd(fd: int) -> None:
    """Check that a descriptor received from a peer is an eventfd on which a write cannot block.

    All processes that hold the eventfd share its blocking mode, so the peer has to set it before it passes the eventfd.

    Raises:
        ProtocolError: the descriptor is not an eventfd, or a write to it can block.
        OSError: /proc cannot be read.
    """
    kind = os.readlink(f"/proc/self/fd/{fd}")
    if kind != "anon_inode:[eventfd]":
        raise ProtocolError(f"a peer passed {kind} instead of an eventfd")
    if os.get_blocking(fd):
        raise ProtocolError("a peer passed a blocking eventfd; it must be non-blocking")
