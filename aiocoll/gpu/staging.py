"""Page-locked memory of the host, used again and again: to get some takes CUDA milliseconds, and stops the device."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from numpy.typing import NDArray

from aiocoll.gpu.api import Cuda

__all__ = ["Staging"]

#: A block is no smaller, in bytes: CUDA locks whole pages.
SMALLEST = 4096
#: Bytes that are kept though nobody uses them; what comes back beyond is freed.
KEPT = 256 << 20


class Staging:
    """Blocks of page-locked memory; any thread may take and give, but the loop should not take.

    Args:
        cuda: the runtime.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = threading.Lock()
        # By size, a power of two; what was used last, and is in the caches, goes out first.
        self._free: defaultdict[int, list[NDArray[Any]]] = defaultdict(list)
        self._kept = 0

    @property
    def kept(self) -> int:
        """Bytes that nobody uses."""
        return self._kept

    def take(self, nbytes: int) -> NDArray[Any]:
        """Return a block of uint8, of `nbytes` or up to twice as many.

        Raises:
            DeviceError: there is no memory left that could be locked.
        """
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free[size]
            if free:
                self._kept -= size
                return free.pop()
        return self._cuda.pinned(size)

    def give(self, block: NDArray[Any]) -> None:
        """Take back a block that `take` has returned, which neither host nor device uses any more."""
        with self._lock:
            if self._kept + block.nbytes <= KEPT:
                self._kept += block.nbytes
                self._free[block.nbytes].append(block)

    def clear(self) -> None:
        """Free what nobody uses."""
        with self._lock:
            self._free.clear()
            self._kept = 0
