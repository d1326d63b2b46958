"""The job's folder of unix sockets, one per process, for `aiocoll top`; accessible only to its owner."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from aiocoll.numerals import parse_int
from aiocoll.users import owner_trouble

__all__ = ["connect", "listen", "open_folder", "processes", "remove"]

_SUFFIX = ".sock"
#: Length of the socket's accept queue. More simultaneous viewers are rare, and they retry a second later.
_BACKLOG = 8


def open_folder(path: str) -> int:
    """Open a folder that only this user may enter, and return its descriptor.

    Raises:
        OSError: the path is not a folder, or other users may enter it; the text contains the remedy.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    foreign = owner_trouble(fd)
    if foreign is None and not os.fstat(fd).st_mode & 0o077:
        return fd
    os.close(fd)
    if foreign is not None:
        raise PermissionError(f"the folder {foreign}")
    raise PermissionError("other users may enter the folder; run `chmod 700` on it")


def listen(folder: int) -> socket.socket:
    """Return a listening unix socket in a folder, named after this process's id.

    The socket gets its final name only once it listens. So a viewer whose connection is refused knows that the process
    has ended.

    Raises:
        OSError: the socket cannot be made or bound.
    """
    name, beginning = _name(os.getpid()), f".{os.getpid()}"
    remove(folder, beginning)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.bind(_path(folder, beginning))
        listening.listen(_BACKLOG)
        os.rename(beginning, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        listening.close()
        remove(folder, beginning)
        raise
    return listening


def remove(folder: int, name: str | None = None) -> None:
    """Remove this process's socket, or the entry `name`, from the folder; do nothing if it does not exist."""
    with suppress(OSError):
        os.unlink(_name(os.getpid()) if name is None else name, dir_fd=folder)


def processes(folder: int) -> list[int]:
    """Return the ids of the processes that have a socket in the folder."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX):
            with suppress(ValueError):
                found.append(parse_int(name.removesuffix(_SUFFIX)))
    return sorted(found)


def connect(folder: int, process: int) -> socket.socket:
    """Return a nonblocking connection to the unix socket of a process.

    Raises:
        FileNotFoundError: the process no longer listens.
        ConnectionRefusedError: the process has ended.
        BlockingIOError: too many other viewers are connecting.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(_path(folder, _name(process)))
    except BaseException:
        connection.close()
        raise
    return connection


def _name(process: int) -> str:
    return f"{process}{_SUFFIX}"


def _path(folder: int, name: str) -> str:
    """Return a path of an entry in the folder that is short enough for a unix socket address."""
    return f"/proc/self/fd/{folder}/{name}"
