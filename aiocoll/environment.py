"""Secrets in the environment: read once, then erased.

Linux shows the environment that a process was started with in ``/proc/PID/environ`` for the life of the process,
whatever happens to `os.environ`: it reads the block of memory that the kernel filled at the start.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

__all__ = ["take"]

#: Indices of the block's begin and end in /proc/self/stat, counted from the field after the name of the program.
_FIELDS = slice(47, 49)


def take(environ: MutableMapping[str, str], name: str) -> str | None:
    """Remove a variable from the environment; return its value, None if there is none.

    If `environ` is that of this process, the bytes are also overwritten in the block that the process was started
    with, if the system permits it and the entry is still there. Children that were forked before keep theirs.
    """
    value = environ.pop(name, None)
    if value is not None and environ is os.environ:
        _forget(os.fsencode(name))
    return value


def _forget(name: bytes) -> None:
    """Overwrite the bytes of a variable that `os.environ` leaves in memory; other variables stay where they are."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            begin, end = map(int, stat.read().rpartition(b")")[2].split()[_FIELDS])
        # Written through /proc/self/mem: an address that is not mapped is an error there, not a crash.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            block = memory.read(end - begin)
            for entry in re.finditer(rb"(?:^|(?<=\0))" + re.escape(name) + rb"=([^\0]*)", block):
                memory.seek(begin + entry.start(1))
                memory.write(bytes(len(entry[1])))
    except (OSError, ValueError, OverflowError):
        return  # not Linux, or it hides this from us
