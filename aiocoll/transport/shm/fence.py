"""Memory fences: when another core sees what this one has stored, as flags in shared memory need.

- `order` stands between data and the flag that announces it, on both sides. x86-64 keeps stores in order, and loads in
  order, so nothing is needed there.
- `full` stands between "I have said X" and "have you said Y?", where both sides ask: the rank that goes to sleep, and
  the one that would wake it. Every machine may let that load pass that store.
"""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Fences", "fences", "stores_words"]

#: Processors that load and store an aligned word of 8 bytes in one step. Others may show half of it.
_WHOLE_WORDS = frozenset(
    {"x86_64", "amd64", "aarch64", "arm64", "ppc64", "ppc64le", "riscv64", "s390x", "loongarch64", "mips64", "sparc64"}
)

_SEQ_CST = 5
"""`memory_order_seq_cst` of C11, as compilers number it."""


class Fences(NamedTuple):
    """What to call at the two places; `order` is None where the machine keeps that order by itself."""

    order: Callable[[], object] | None
    full: Callable[[], object]


def stores_words(machine: str | None = None) -> bool:
    """Return whether this process stores words of 8 bytes whole, as all flags in shared memory need."""
    return sys.maxsize > 2**32 and (machine or platform.machine()).lower() in _WHOLE_WORDS


def fences(machine: str | None = None) -> Fences | None:
    """Return the fences of this machine; None where there are none, and only the kernel can be asked to pass flags."""
    if not stores_words(machine):
        return None
    if (machine or platform.machine()) in ("x86_64", "AMD64"):
        return Fences(None, _locked())
    import ctypes  # not on x86-64: it takes longer to import than the rest of the transport

    try:
        fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.argtypes = [ctypes.c_int]
    fence.restype = None
    return Fences(lambda: fence(_SEQ_CST), lambda: fence(_SEQ_CST))


def _locked() -> Callable[[], object]:
    """A free lock is taken with a locked instruction, which is a full fence on x86-64, at a third of a foreign call."""
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def full() -> None:
        # It does not wait: an exception of a signal handler may have come between the two before.
        acquire(False)
        release()

    return full
