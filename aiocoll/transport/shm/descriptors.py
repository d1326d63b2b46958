"""Descriptors that come over a unix socket."""

from __future__ import annotations

import array
import socket

__all__ = ["recv_fds"]


def recv_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """As `socket.recv_fds`, but no child process inherits the descriptors."""
    space = socket.CMSG_LEN(most * array.array("i").itemsize) if most else 0
    data, ancillary, _, _ = sock.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
