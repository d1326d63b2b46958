"""Reading of secrets from environment variables, and erasure of these variables.

Linux shows the initial environment of a process in ``/proc/PID/environ`` as long as the process lives. Changes of
`os.environ` have no effect there, because Linux reads the memory block that the kernel filled at the start.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

__all__ = ["take"]

#: Fields of /proc/self/stat, counted after the program name, with the start and end address of the environment.
_FIELDS = slice(47, 49)


def take(environ: MutableMapping[str, str], name: str) -> str | None:
    """Remove a variable from the environment, and return its value; None if it is not set.

    If `environ` is that of this process, its bytes in the initial memory block are also overwritten, if the system
    permits it and the entry is still there. Children that were forked before keep their copies.
    """
    value = environ.pop(name, None)
    if value is not None and environ is os.environ:
        _overwrite(os.fsencode(name))
    return value


def _overwrite(name: bytes) -> None:
    """Overwrite the bytes of a variable in the process's initial environment block, without moving other variables."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            begin, end = map(int, stat.read().rpartition(b")")[2].split()[_FIELDS])
        # Write through /proc/self/mem, where an unmapped address causes an error instead of a crash.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            block = memory.read(end - begin)
            for entry in re.finditer(rb"(?:^|(?<=\0))" + re.escape(name) + rb"=([^\0]*)", block):
                memory.seek(begin + entry.start(1))
                memory.write(bytes(len(entry[1])))
    except (OSError, ValueError, OverflowError):
        return  # not Linux, or access is denied
