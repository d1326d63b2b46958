"""Receive buffers that the links of one transport share.

A link needs its buffer while it reads and while a part of a frame is in it: hardly ever, and seldom two links at once.
So an idle link costs no buffer, whatever it has carried, and all read into memory that is in the cache.
"""

from __future__ import annotations

from aiocoll.transport.frame import HEADER_SIZE, SEGMENT

__all__ = ["BufferPool"]

#: A frame of the largest size between two headers: its own, and the next one's, which is read together with it.
NBYTES = 2 * HEADER_SIZE + SEGMENT
#: Unused buffers kept, 2 MiB: more are in use at once only while large frames of as many peers arrive in small parts.
MOST = 8


class BufferPool:
    """Buffers of `NBYTES` bytes that no link uses."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a buffer with any content."""
        return self._free.pop() if self._free else memoryview(bytearray(NBYTES))

    def give(self, buffer: memoryview) -> None:
        """Take back a buffer of which there are no views."""
        if len(self._free) < MOST:
            self._free.append(buffer)
