"""What this process holds of shared memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["mapped"]


def mapped() -> list[str]:
    """Return what this process has mapped of memory without a name, and holds open of it."""
    fds = Path("/proc/self/fd")
    files = [os.readlink(fds / fd) for fd in os.listdir(fds) if (fds / fd).is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [each for each in (*maps, *files) if "memfd:aiocoll" in each]
