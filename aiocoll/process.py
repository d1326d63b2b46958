"""State of other processes on this host: running, stopped or ended. Linux only; elsewhere the state is unknown.

Three observations prove that a process has ended: its pidfd is readable; signal 0 finds no process with its number in
this PID namespace; /proc/<pid>/stat shows another start time, or an exited process. Only `state` decides. Every other
error (no descriptor, no memory, no permission, no /proc, a hidden entry) is a problem of the observer and proves
nothing.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
from typing import Final, NamedTuple

__all__ = [
    "GONE",
    "STOPPED",
    "UNKNOWN",
    "PidFd",
    "ProcessId",
    "identify",
    "open_pidfd",
    "peer_id",
    "peer_process",
    "state",
    "this_process",
]

STOPPED: Final = "stopped"
GONE: Final = "gone"
UNKNOWN: Final = "unknown"
_ALIVE: Final = "alive"
#: Used instead of a state letter if the pid now belongs to another process.
_OTHER: Final = "other"

#: State letters of /proc/<pid>/stat; see proc(5).
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "I": "sleeping",
    "T": STOPPED,
    "t": STOPPED,  # by a debugger
    "Z": GONE,  # a zombie: its parent has not read its exit status
    "X": GONE,
    _OTHER: GONE,
}
#: Socket option that returns a pidfd of the process at the other end (Linux 6.5). `socket` has no name for it.
_SO_PEERPIDFD = 77
#: struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")
#: Indices of fields after the process name, which proc(5) numbers from 3.
_THREADS = 20 - 3
_START = 22 - 3
#: The largest pid of 64-bit Linux (PID_MAX_LIMIT), to check pids that peers have published.
_MAX_PID = 1 << 22


class ProcessId(NamedTuple):
    """The identity of a process, different from every other process that the kernel has run.

    Attributes:
        namespace: identifies the PID namespace of `pid` and the time namespace of `started`; 0 if /proc cannot be read.
        pid: its number, which the kernel may assign to another process later.
        started: clock ticks from the start of the kernel to the start of the process.
    """

    namespace: int
    pid: int
    started: int


class PidFd:
    """A process identified by a pidfd. Unlike a pid, a pidfd is never reused, and it works across PID namespaces.

    Args:
        fd: the pidfd, which `close` closes.

    Raises:
        OSError: the descriptor cannot be used. It is closed then.
    """

    __slots__ = ("_fd", "_file")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            self._file = os.fstat(fd)
        except OSError:
            self.close()
            raise

    def has_ended(self) -> bool | None:
        """Return whether the process has ended; None if its state cannot be read now. Any thread may call this."""
        try:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(0):
                return False if self._is_intact() else None
            return True if self._is_intact() and self._is_pidfd() else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_intact(self) -> bool:
        """Return whether the descriptor still refers to the same file: the program may have closed and reused it."""
        return os.path.samestat(os.fstat(self._fd), self._file)

    def _is_pidfd(self) -> bool:
        """Return whether the descriptor is a pidfd. Before Linux 6.9, other descriptors may have the same inode."""
        try:
            signal.pidfd_send_signal(self._fd, 0)
        except AttributeError:  # Python was built with headers of an older kernel
            return True
        except OSError as error:
            return error.errno != errno.EBADF
        return True


def peer_process(sock: socket.socket) -> PidFd | None:
    """Return the process at the other end of a connected unix socket; None if the system does not report it."""
    if sock.family != getattr(socket, "AF_UNIX", None):
        return None
    try:
        return PidFd(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        return None


def open_pidfd(process: ProcessId) -> PidFd | None:
    """Return a pidfd of `process`; None if it has ended, is not visible, or no descriptor is free."""
    if not _is_visible(process):
        return None
    try:
        pidfd = PidFd(os.pidfd_open(process.pid))
    except (OSError, AttributeError):  # this Python was built for a kernel without pidfd_open
        return None
    # Check after opening: if the pid still belongs to `process` now, it did so when the pidfd was opened.
    if _read_state_letter(process) in (None, _OTHER):
        pidfd.close()
        return None
    return pidfd


def this_process() -> ProcessId:
    """Return the identity of this process, for other processes of its host."""
    return _identify("self", os.getpid())


def peer_id(sock: socket.socket) -> ProcessId | None:
    """Return the identity of the process at the other end of a connected unix socket; None if it is not visible."""
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    found = identify(pid)
    return found if found.namespace else None


def identify(pid: int) -> ProcessId:
    """Return the identity of the process `pid`; its namespace is 0 if it cannot be read."""
    return _identify(str(pid), pid)


def _identify(entry: str, pid: int) -> ProcessId:
    try:
        return ProcessId(_namespace(), pid, int(_fields(entry)[_START]))
    except (OSError, IndexError):
        return ProcessId(0, pid, 0)


def state(process: ProcessId | None, pidfd: PidFd | None = None) -> str:
    """Return the state of a process on this host.

    `GONE` if its end is proven, `UNKNOWN` if no observation is possible.

    Args:
        process: its identity; None if unknown, as for a process of another PID namespace.
        pidfd: a pidfd of the process; None without one.
    """
    ended = None if pidfd is None else pidfd.has_ended()
    if ended:
        return GONE
    if process is None or not _is_visible(process):
        return UNKNOWN if ended is None else _ALIVE
    letter = _read_state_letter(process)
    found = UNKNOWN if letter is None else _STATES.get(letter, _ALIVE)
    if found in (GONE, UNKNOWN):
        if ended is False:
            return _ALIVE
        proven = (found == GONE and _is_own_proc()) or _has_no_process(process.pid)
        return GONE if proven else UNKNOWN
    return found


def _is_visible(process: ProcessId) -> bool:
    """Return whether the pid of `process` refers to it in the PID namespace of this process, too."""
    return 0 < process.pid <= _MAX_PID and process.namespace == _namespace() != 0


def _namespace() -> int:
    """Return a number that identifies this process's PID and time namespaces; 0 if they cannot be read."""
    try:
        pids = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
    try:
        times = os.stat("/proc/self/ns/time").st_ino
    except FileNotFoundError:  # a kernel before 5.6
        times = 0
    except OSError:
        return 0
    return pids << 16 ^ times


def _read_state_letter(process: ProcessId) -> str | None:
    """Return the state letter of a process, as in proc(5), or `_OTHER`; None if it cannot be read."""
    try:
        fields = _fields(str(process.pid))
        if int(fields[_START]) != process.started:
            return _OTHER
        # "Z" with several threads: only the main thread has ended, and the process continues.
        return "S" if fields[0] == "Z" and int(fields[_THREADS]) > 1 else fields[0]
    except (OSError, ValueError, IndexError):
        return None


def _has_no_process(pid: int) -> bool:
    """Return whether no process has the number `pid` in this PID namespace."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _is_own_proc() -> bool:
    """Return whether /proc shows this process's PID namespace; a container may have mounted that of another one."""
    try:
        with open("/proc/self/status", "rb") as file:
            numbers = next((line.split()[1:] for line in file if line.startswith(b"NSpid:")), [])
    except OSError:
        return False
    return numbers == [str(os.getpid()).encode()]


def _fields(entry: str) -> list[str]:
    with open(f"/proc/{entry}/stat", "rb") as file:
        # Split after the last parenthesis: the process name may contain any characters, including parentheses.
        return file.read().rpartition(b")")[2].decode().split()
