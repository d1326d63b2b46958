"""Memory fences for flags in shared memory. They order the loads and stores of one core as other cores see them.

- `order` separates data from the flag that announces it, in the writer and in the reader. x86-64 keeps stores in order
  and loads in order, so it needs no instruction there.
- `full` separates a store of this rank's flag from a load of the peer's flag, where both ranks do the same: a rank that
  goes to sleep, and a rank that may have to wake it. Every processor may otherwise execute the load before the store.
"""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Fences", "fences", "has_atomic_stores"]

#: Processors that load and store an aligned 8-byte word atomically. On other processors, a reader may see half of a
#: store.
_ATOMIC_WORD_MACHINES = frozenset(
    {"x86_64", "amd64", "aarch64", "arm64", "ppc64", "ppc64le", "riscv64", "s390x", "loongarch64", "mips64", "sparc64"}
)

_SEQ_CST = 5
"""`memory_order_seq_cst` in C11, in the numbering of compilers."""


class Fences(NamedTuple):
    """Two memory fences as functions. `order` is None on processors that need no instruction for this fence."""

    order: Callable[[], object] | None
    full: Callable[[], object]


def has_atomic_stores(machine: str | None = None) -> bool:
    """Return whether this processor stores aligned 8-byte words atomically, as flags in shared memory require."""
    return sys.maxsize > 2**32 and (machine or platform.machine()).lower() in _ATOMIC_WORD_MACHINES


def fences(machine: str | None = None) -> Fences | None:
    """Return this machine's memory fences; None if there are none, so that ranks must use sockets."""
    if not has_atomic_stores(machine):
        return None
    if (machine or platform.machine()) in ("x86_64", "AMD64"):
        return Fences(None, _make_lock_fence())
    import ctypes  # here, since x86-64 does not need it, and it loads more slowly than the package

    try:
        fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.argtypes = [ctypes.c_int]
    fence.restype = None
    return Fences(lambda: fence(_SEQ_CST), lambda: fence(_SEQ_CST))


def _make_lock_fence() -> Callable[[], object]:
    """Make a full memory fence for x86-64 from an unused lock. Its locked instruction is 3× faster than `ctypes`."""
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def full() -> None:
        # Do not block: the lock may still be held if a signal handler raised an exception between `acquire` and
        # `release`.
        acquire(False)
        release()

    return full
