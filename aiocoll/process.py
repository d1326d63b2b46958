"""The state of other processes of this host: running, stopped or gone. Linux only; elsewhere always unknown."""

from __future__ import annotations

import os
import select
import socket
from typing import NamedTuple

__all__ = ["GONE", "STOPPED", "PidFd", "ProcessId", "peer_process", "state", "this_process"]

STOPPED = "stopped"
GONE = "gone"

#: The letters of /proc/<pid>/stat; see proc(5).
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "I": "sleeping",
    "T": STOPPED,
    "t": STOPPED,  # by a debugger
    "Z": GONE,  # a zombie: its parent has not read its exit status
    "X": GONE,
}
#: The socket option that gives a descriptor of the process at the other end (Linux 6.5); `socket` has no name for it.
_SO_PEERPIDFD = 77
#: Index of the start time among the fields after the name, which are numbered from 3 in proc(5).
_START = 22 - 3


class ProcessId(NamedTuple):
    """Identifies one process among all that a kernel has run.

    Attributes:
        namespace: the pid namespace of `pid`; 0 where /proc cannot be read.
        pid: its number, which the kernel may give to another process later.
        started: clock ticks from the start of the kernel to the start of the process.
    """

    namespace: int
    pid: int
    started: int


class PidFd:
    """A process by a pidfd, which never refers to another process later and works in any namespace."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def gone(self) -> bool:
        """Whether it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def peer_process(sock: socket.socket) -> PidFd | None:
    """Return the process at the other end of a connected unix socket; None if the system does not tell."""
    if sock.family != getattr(socket, "AF_UNIX", None):
        return None
    try:
        return PidFd(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        return None


def this_process() -> ProcessId:
    """Return the identity of this process, for other processes of its host."""
    pid = os.getpid()
    try:
        return ProcessId(os.stat("/proc/self/ns/pid").st_ino, pid, int(_fields(pid)[_START]))
    except OSError:
        return ProcessId(0, pid, 0)


def state(process: ProcessId | PidFd) -> str:
    """Return the state of `process`, one of this host, as far as this pid namespace shows it."""
    if isinstance(process, PidFd):
        return GONE if process.gone() else "alive"
    try:
        fields = _fields(process.pid)
    except OSError:
        return GONE
    return GONE if int(fields[_START]) != process.started else _STATES.get(fields[0], "alive")


def _fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name stands in parentheses and may contain anything, parentheses too.
        return file.read().rpartition(b")")[2].decode().split()
