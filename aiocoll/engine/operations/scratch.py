"""Memory for partial results, kept between operations.

The system takes large blocks back at once, and returns them page by page, zeroed: the first write to a page costs
several times as much as reducing into memory in use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scratch"]

#: Bytes from which on the allocator maps separate memory for a block (glibc: M_MMAP_THRESHOLD).
LARGE = 128 * 1024
#: Bytes kept in all: for a few operations of the sizes that are common.
MOST = 64 * 1024 * 1024


class Scratch:
    """The unused blocks of one endpoint."""

    __slots__ = ("_kept", "_nbytes")

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []
        self._nbytes = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return `count` elements with any content."""
        nbytes = count * dtype.itemsize
        if nbytes < LARGE:
            return np.empty(count, dtype)
        for index, block in enumerate(self._kept):
            # A much larger block is left for larger requests.
            if nbytes <= block.nbytes <= 2 * nbytes:
                del self._kept[index]
                self._nbytes -= block.nbytes
                return block[:nbytes].view(dtype)
        return np.empty(nbytes, np.uint8).view(dtype)

    def give(self, array: NDArray[Any]) -> None:
        """Take back an array that nobody uses any more."""
        block = array
        while isinstance(block.base, np.ndarray):
            block = block.base
        if block.nbytes < LARGE or block.nbytes > MOST:
            return
        self._kept.append(block)
        self._nbytes += block.nbytes
        while self._nbytes > MOST:
            self._nbytes -= self._kept.pop(0).nbytes
