"""Secrets in the environment: read once, and gone.

Linux shows the environment that a process was started with in ``/proc/PID/environ`` for as long as it lives, whatever
becomes of `os.environ`: what it reads is the block of memory that the kernel filled at the start.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

__all__ = ["take"]

#: Of /proc/self/stat, counted from the one after the name of the program: where that block begins and ends.
_FIELDS = slice(47, 49)


def take(environ: MutableMapping[str, str], name: str) -> str | None:
    """Remove a variable from the environment; return its value, None if there is none.

    If `environ` is that of this process, its bytes are overwritten in the block that it was started with, where the
    system lets us and the entry is still there. Children that were forked before keep theirs.
    """
    value = environ.pop(name, None)
    if value is not None and environ is os.environ:
        _forget(os.fsencode(name))
    return value


def _forget(name: bytes) -> None:
    """Overwrite the bytes of a variable that `os.environ` leaves; other variables stay where they are."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            begin, end = map(int, stat.read().rpartition(b")")[2].split()[_FIELDS])
        # Through a file: an address that is not, or no longer, ours is an error here.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            block = memory.read(end - begin)
            for entry in re.finditer(rb"(?:^|(?<=\0))" + re.escape(name) + rb"=([^\0]*)", block):
                memory.seek(begin + entry.start(1))
                memory.write(bytes(len(entry[1])))
    except (OSError, ValueError, OverflowError):
        return  # not Linux, or it hides this from us
