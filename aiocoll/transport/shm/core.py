"""CPU core that a thread runs on."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["core"]


def core() -> int:
    """Return the number of the core that runs this thread, from 1; 0 if the system does not report it."""
    return _load_sched_getcpu()() + 1


@functools.cache
def _load_sched_getcpu() -> Callable[[], int]:
    try:
        # `sched_getcpu` needs no system call. `PyDLL` keeps the GIL: to release it would take longer than the call.
        sched_getcpu = ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: -1
    return sched_getcpu
