"""Pool of page-locked host memory, because allocating such memory takes milliseconds and stops the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from aiocoll.gpu.api import Cuda

__all__ = ["Staging"]

#: Size of the smallest block in bytes: one page, because CUDA page-locks whole pages.
SMALLEST = 4096
#: Maximum total size of unused blocks in bytes. Beyond it, the least recently used blocks are freed.
KEPT = 1 << 30


class Staging:
    """A thread-safe pool of page-locked memory blocks.

    The method `take` may block, so event loops must not call it.

    Args:
        cuda: the CUDA runtime.
        elsewhere: calls a function in another thread once the device is idle; freeing a block waits for the device.
    """

    def __init__(self, cuda: Cuda, elsewhere: Callable[[Callable[[], None]], object]) -> None:
        self._cuda = cuda
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        # Unused blocks by size, in the order of their return. `find` takes the most recent one, which is still in CPU
        # caches.
        self._free: dict[int, list[NDArray[Any]]] = {}
        self._kept = 0

    @property
    def kept(self) -> int:
        """The total size of unused blocks in bytes."""
        return self._kept

    def take(self, nbytes: int) -> NDArray[Any]:
        """Return a page-locked uint8 block of at least `nbytes`, unused or newly allocated; may block.

        The block is longer by at most a quarter or one page.

        Raises:
            DeviceError: no memory could be page-locked.
        """
        found = self.find(nbytes)
        return self._cuda.pinned(_size(nbytes)) if found is None else found

    def find(self, nbytes: int) -> NDArray[Any] | None:
        """Return an unused block that fits `nbytes`, without allocating; None if the pool has none."""
        size = _size(nbytes)
        with self._lock:
            if free := self._free.get(size):
                self._kept -= size
                return free.pop()
        return None

    def give(self, block: NDArray[Any]) -> None:
        """Return a block to the pool; neither host nor device may use the block any more."""
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
        """Free all unused blocks."""
        with self._lock:
            freed, self._free = self._free, {}
            self._kept = 0
        self._elsewhere(freed.clear)


def _size(nbytes: int) -> int:
    """Return the block size for `nbytes` bytes: rounded up, so that blocks can be reused."""
    step = max(SMALLEST, 1 << (nbytes - 1).bit_length() >> 3)
    return max(-(-nbytes // step), 1) * step
