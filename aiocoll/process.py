"""Other processes of this host as the kernel shows them: running, stopped or gone. Linux; elsewhere nothing is seen."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["GONE", "STOPPED", "ProcessId", "state", "this_process"]

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


def this_process() -> ProcessId:
    """Return what this process is to others of its host."""
    pid = os.getpid()
    try:
        return ProcessId(os.stat("/proc/self/ns/pid").st_ino, pid, int(_fields(pid)[_START]))
    except OSError:
        return ProcessId(0, pid, 0)


def state(process: ProcessId) -> str:
    """Say what `process`, one of this host and namespace, does."""
    try:
        fields = _fields(process.pid)
    except OSError:
        return GONE
    return GONE if int(fields[_START]) != process.started else _STATES.get(fields[0], "alive")


def _fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name stands in parentheses and may contain anything, parentheses too.
        return file.read().rpartition(b")")[2].decode().split()
