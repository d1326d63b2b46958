"""A pool of page-locked host memory: allocating it takes CUDA milliseconds, and stops the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from aiocoll.gpu.api import Cuda

__all__ = ["Staging"]

#: The smallest block, in bytes: CUDA locks whole pages.
SMALLEST = 4096
#: Bytes of free blocks that are kept; beyond, the least recently used ones are freed.
KEPT = 1 << 30


class Staging:
    """A pool of page-locked blocks; any thread may take and give, but the loop should not take.

    Args:
        cuda: the runtime.
        elsewhere: calls a function in a thread that may block, when it will not: freeing a block waits for the device.
    """

    def __init__(self, cuda: Cuda, elsewhere: Callable[[Callable[[], None]], object]) -> None:
        self._cuda = cuda
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        # By size, in the order of their return; of each size, the block returned last, which is in the caches, is
        # taken first.
        self._free: dict[int, list[NDArray[Any]]] = {}
        self._kept = 0

    @property
    def kept(self) -> int:
        """Bytes of free blocks."""
        return self._kept

    def take(self, nbytes: int) -> NDArray[Any]:
        """Return a block of uint8, of `nbytes` or a little more: at most a quarter, or one page.

        Raises:
            DeviceError: no memory is left that could be locked.
        """
        found = self.find(nbytes)
        return self._cuda.pinned(_size(nbytes)) if found is None else found

    def find(self, nbytes: int) -> NDArray[Any] | None:
        """Return a free block like `take`; None if there is none."""
        size = _size(nbytes)
        with self._lock:
            if free := self._free.get(size):
                self._kept -= size
                return free.pop()
        return None

    def give(self, block: NDArray[Any]) -> None:
        """Return a block to the pool; neither host nor device may use it any more."""
        freed: list[NDArray[Any]] = []
        with self._lock:
            size = block.nbytes
            self._free[size] = [*self._free.pop(size, ()), block]
            self._kept += size
            while self._kept > KEPT:
                oldest = next(iter(self._free))
                if blocks := self._free[oldest]:
                    freed.append(blocks.pop(0))
                    self._kept -= oldest
                else:
                    del self._free[oldest]
        if freed:
            del block
            self._elsewhere(freed.clear)

    def clear(self) -> None:
        """Free the free blocks."""
        with self._lock:
            freed, self._free = self._free, {}
            self._kept = 0
        self._elsewhere(freed.clear)


def _size(nbytes: int) -> int:
    """Return how many bytes a block for `nbytes` has."""
    step = max(SMALLEST, 1 << (nbytes - 1).bit_length() >> 3)
    return max(-(-nbytes // step), 1) * step
