"""Other processes of this host as the kernel shows them: running, stopped or gone. Linux; elsewhere nothing is seen."""

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
    "Z": GONE,  # its parent has not asked how it ended
    "X": GONE,
}
#: The socket option that gives a descriptor of the process at the other end (Linux 6.5); `socket` has no name for it.
_SO_PEERPIDFD = 77
#: Place of the start time among the fields behind the name, which are numbered from 3 in proc(5).
_START = 22 - 3


class ProcessId(NamedTuple):
    """One process among all that a kernel has run.

    Attributes:
        namespace: in which `pid` counts; 0 where processes cannot be looked at.
        pid: its number, which another process may have later.
        started: clock ticks from the start of the kernel to its own.
    """

    namespace: int
    pid: int
    started: int


class PidFd:
    """A process by a descriptor of it, which stands for no other one later, in whatever namespace it is."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def gone(self) -> bool:
        """Whether it has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of it. Idempotent."""
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
    """Return what this process is to others of its host."""
    pid = os.getpid()
    try:
        return ProcessId(os.stat("/proc/self/ns/pid").st_ino, pid, int(_fields(pid)[_START]))
    except OSError:
        return ProcessId(0, pid, 0)


def state(process: ProcessId | PidFd) -> str:
    """Say what `process`, one of this host, does, as far as can be seen from this namespace."""
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
