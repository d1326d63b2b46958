"""The pool of receive buffers that the links of one transport share.

A link needs a buffer only while it reads, and while a part of a frame is in it. That is rare, and rarely true of two
links at once. So an idle link holds no buffer, whatever it has carried, and all links read into memory that is in the
cache.
"""

from __future__ import annotations

from aiocoll.transport.frame import HEADER_SIZE, SEGMENT

__all__ = ["BufferPool"]

#: Size of a buffer in bytes: one read may return the largest frame and the header of the next frame.
NBYTES = 2 * HEADER_SIZE + SEGMENT
#: Maximum number of unused buffers in the pool (2 MiB). More buffers are in use at once only while more than eight
#: peers send large frames in small parts.
MOST = 8


class BufferPool:
    """A pool of unused receive buffers of `NBYTES` bytes."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Take a buffer with arbitrary content out of the pool, or make one."""
        return self._free.pop() if self._free else memoryview(bytearray(NBYTES))

    def give(self, buffer: memoryview) -> None:
        """Put a buffer back into the pool. No view of the buffer may exist."""
        if len(self._free) < MOST:
            self._free.append(buffer)
