"""Registered memory of one rank, which its peers read in place. `ProcessGroup.empty` returns arrays in it.

    rank 0                                              rank 1
    array -> base -> segment 7 (memfd)         ......>  maps it once, when rank 0 first reduces the array
    queue: "chunk 12 is in segment 7, at 262144"        reads it there

A segment lives as long as any array or view on its base. Then peers unmap it. The kernel frees it with the last process
that maps it, however that process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import weakref
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.transport.shared_memory import Segment
from aiocoll.transport.shm.region import PAGE, create_mapped

__all__ = ["RegisteredMemory"]


class _Base:
    """The base object of NumPy arrays in a segment. Weak references to it die before its memory is unmapped."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.__array_interface__ = np.frombuffer(memory, np.uint8).__array_interface__


class _MappedSegment(Segment):
    """A segment, with the base object of the arrays in it.

    Attributes:
        base: weak reference to the base, which ends with the last array.
    """

    __slots__ = ("base",)

    base: weakref.ref[_Base]


class RegisteredMemory:
    """The segments of one rank that its peers read in place.

    Args:
        loop: the loop that notifies peers of the end of a segment. Any thread may drop the last array.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        #: The segments, sorted by address.
        self.segments: list[_MappedSegment] = []
        #: Whether a shortage of memory has been logged.
        self.troubled = False
        self._loop = loop
        self._count = 0
        self._closed = False

    async def make(self, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` > 0 of zeroed memory in a new segment, made in short steps that let the event loop run.

        Raises:
            OSError: no memory or descriptor is left, or the kernel forbids it.
        """
        size = nbytes + -nbytes % PAGE
        if size > _available():
            raise OSError(errno.ENOMEM, f"{nbytes} bytes exceed the free memory of this host")
        fd, memory = await create_mapped(size)
        base = _Base(memory)
        array = np.asarray(base)
        if self._closed:
            os.close(fd)
        else:
            self._count += 1
            self._add(_MappedSegment(self._count, base.__array_interface__["data"][0], size, fd), base)
        return array[:nbytes]

    def find(self, array: NDArray[Any]) -> tuple[_MappedSegment, int] | None:
        """Return the segment that contains a contiguous array, and the array's offset in it; None without a segment."""
        start: int = array.__array_interface__["data"][0]
        place = bisect_right(self.segments, start, key=_segment_start) - 1
        if place < 0:
            return None
        segment = self.segments[place]
        offset = start - segment.start
        # Check that the segment still exists: otherwise, other memory may use its addresses now.
        return (segment, offset) if offset + array.nbytes <= segment.nbytes and segment.base() is not None else None

    def close(self) -> None:
        """Request that peers unmap all segments. The program's arrays stay valid."""
        self._closed = True
        segments, self.segments = self.segments, []
        for segment in segments:
            _end_segment(segment)

    def _add(self, segment: _MappedSegment, base: _Base) -> None:
        self._sweep()

        def ended(_: object) -> None:
            # The garbage collector may call this function in any thread, between any two instructions.
            segment.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all links with it
                self._loop.call_soon_threadsafe(self._sweep)

        segment.base = weakref.ref(base, ended)
        self.segments.insert(bisect_right(self.segments, segment.start, key=_segment_start), segment)

    def _sweep(self) -> None:
        for segment in [segment for segment in self.segments if segment.base() is None]:
            self.segments.remove(segment)
            _end_segment(segment)


def _segment_start(segment: _MappedSegment) -> int:
    return segment.start


def _end_segment(segment: _MappedSegment) -> None:
    segment.close()
    for ended in segment.readers:
        ended(segment.number)


def _available() -> int:
    """Return the bytes that can be allocated before the kernel would have to kill a process."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
