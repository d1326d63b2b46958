"""Memory pool for partial results, kept between operations.

The system takes freed large blocks back at once. It returns them page by page, zeroed. The first write to a page takes
several times as long as reducing into memory in use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scratch"]

#: Minimum size in bytes of a kept block. From this size on, the allocator maps and unmaps memory for each block (glibc:
#: M_MMAP_THRESHOLD).
LARGE = 128 * 1024
#: Maximum number of bytes in the pool, enough for a few operations of common sizes.
MOST = 64 * 1024 * 1024


class Scratch:
    """The pool of unused memory blocks of one endpoint."""

    __slots__ = ("_kept", "_nbytes")

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []
        self._nbytes = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised array of `count` elements, from the pool if a block fits."""
        nbytes = count * dtype.itemsize
        if nbytes < LARGE:
            return np.empty(count, dtype)
        for index, block in enumerate(self._kept):
            # Do not use a block of more than twice the size: keep it for larger requests.
            if nbytes <= block.nbytes <= 2 * nbytes:
                del self._kept[index]
                self._nbytes -= block.nbytes
                return block[:nbytes].view(dtype)
        return np.empty(nbytes, np.uint8).view(dtype)

    def give(self, array: NDArray[Any]) -> None:
        """Put an unused array back into the pool."""
        block = array
        while isinstance(block.base, np.ndarray):
            block = block.base
        if block.nbytes < LARGE or block.nbytes > MOST:
            return
        self._kept.append(block)
        self._nbytes += block.nbytes
        while self._nbytes > MOST:
            self._nbytes -= self._kept.pop(0).nbytes
