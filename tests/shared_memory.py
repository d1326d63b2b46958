"""Shared memory of aiocoll in the test process: the chunk queue layout and the current mappings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from aiocoll.native import core
from aiocoll.transport.shm.layout import Direction, LinkLayout

__all__ = ["QUEUE", "mapped"]

_BETWEEN_NATIVE = LinkLayout(2).directions[0]
#: The memory layout of a chunk queue between two ranks that use the same implementation (C or Python) as this process.
QUEUE: Final[Direction] = _BETWEEN_NATIVE if core is not None else _BETWEEN_NATIVE.with_large_chunks()


def mapped() -> list[str]:
    """Return the mappings and open descriptors of memory files (memfd) that aiocoll made in this process."""
    fds = Path("/proc/self/fd")
    files = [os.readlink(fds / fd) for fd in os.listdir(fds) if (fds / fd).is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [each for each in (*maps, *files) if "memfd:aiocoll" in each]
