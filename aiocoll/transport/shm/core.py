"""Which core this process runs on."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["core"]


def core() -> int:
    """Return the number of the core that runs this thread, from 1; 0 if the system does not tell."""
    return _ask()() + 1


@functools.cache
def _ask() -> Callable[[], int]:
    try:
        # The C library answers without a system call; `PyDLL` keeps the GIL, which takes less time than giving it away.
        ask = ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: -1
    return ask
