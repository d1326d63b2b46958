"""The folder of a job: each of its processes listens on a unix socket in it, which only its user may enter."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from aiocoll.numerals import parse_int
from aiocoll.users import owner_trouble

__all__ = ["connect", "listen", "open_folder", "processes", "remove"]

_SUFFIX = ".sock"
#: Connections that wait to be accepted; more viewers are rare, and come again a second later.
_BACKLOG = 8


def open_folder(path: str) -> int:
    """Return a descriptor of a folder that only this user may enter.

    Raises:
        OSError: it is none, or others may enter it; the text says what to do.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    foreign = owner_trouble(fd)
    if foreign is None and not os.fstat(fd).st_mode & 0o077:
        return fd
    os.close(fd)
    if foreign is not None:
        raise PermissionError(f"it {foreign}")
    raise PermissionError("other users may enter it; chmod 700 it")


def listen(folder: int) -> socket.socket:
    """Return a socket that listens in a folder under the number of this process.

    It gets its name when it listens: whoever finds the name and is refused knows that the process is gone.

    Raises:
        OSError: it cannot.
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
    """Remove the name of this process's socket, or another one; it need not be there."""
    with suppress(OSError):
        os.unlink(_name(os.getpid()) if name is None else name, dir_fd=folder)


def processes(folder: int) -> list[int]:
    """Return the numbers of the processes that have listened in a folder and not said that they end."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX):
            with suppress(ValueError):
                found.append(parse_int(name.removesuffix(_SUFFIX)))
    return sorted(found)


def connect(folder: int, process: int) -> socket.socket:
    """Return a connection to a process, which does not block.

    Raises:
        FileNotFoundError: it listens no more.
        ConnectionRefusedError: it is gone.
        BlockingIOError: too many others want to connect.
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
    """Return a path that is short enough for the address of a socket, whatever that of the folder is."""
    return f"/proc/self/fd/{folder}/{name}"
