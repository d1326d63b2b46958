"""Registered memory of a rank: its peers read it in place. `ProcessGroup.empty` returns arrays in it.

    rank 0                                              rank 1
    array -> base -> segment 7 (memfd)         ......>  maps it once, when rank 0 first reduces the array
    queue: "chunk 12 is in segment 7, at 262144"        reads it there

A segment lives as long as any array with its base does, whatever views of one another they are; then peers unmap it.
The kernel frees it when the last process that maps it is gone, however it ended.
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
    """The base of NumPy's arrays: weak references to it end before its memory is unmapped."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.__array_interface__ = np.frombuffer(memory, np.uint8).__array_interface__


class _MappedSegment(Segment):
    """A segment, and the memory of this rank's arrays in it.

    Attributes:
        base: of the arrays; it ends with the last of them.
    """

    __slots__ = ("base",)

    base: weakref.ref[_Base]


class RegisteredMemory:
    """All segments of one rank: memory that its peers read in place.

    Args:
        loop: in which peers are told that a segment has ended, in whatever thread its last array was dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        #: By address.
        self.segments: list[_MappedSegment] = []
        #: Whether it has been logged that there is no memory for one.
        self.troubled = False
        self._loop = loop
        self._made = 0
        self._closed = False

    async def make(self, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` > 0 of zeroed memory in a segment of its own, in many turns of the loop.

        Raises:
            OSError: there is no memory or descriptor left, or the kernel forbids it.
        """
        size = nbytes + -nbytes % PAGE
        if size > _available():
            raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than this host has left")
        fd, memory = await create_mapped(size)
        base = _Base(memory)
        array = np.asarray(base)
        if self._closed:
            os.close(fd)
        else:
            self._made += 1
            self._add(_MappedSegment(self._made, base.__array_interface__["data"][0], size, fd), base)
        return array[:nbytes]

    def find(self, array: NDArray[Any]) -> tuple[_MappedSegment, int] | None:
        """Return the segment in which all of a contiguous array lies, and its offset there; None if there is none."""
        start: int = array.__array_interface__["data"][0]
        place = bisect_right(self.segments, start, key=_start) - 1
        if place < 0:
            return None
        segment = self.segments[place]
        offset = start - segment.start
        # A segment may have ended without a sweep since: its addresses may be in other use by now.
        return (segment, offset) if offset + array.nbytes <= segment.nbytes and segment.base() is not None else None

    def close(self) -> None:
        """Have peers unmap everything; the arrays of users stay valid."""
        self._closed = True
        segments, self.segments = self.segments, []
        for segment in segments:
            _end(segment)

    def _add(self, segment: _MappedSegment, base: _Base) -> None:
        self._sweep()

        def ended(_: object) -> None:
            # In any thread, and in the midst of anything.
            segment.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all links with it
                self._loop.call_soon_threadsafe(self._sweep)

        segment.base = weakref.ref(base, ended)
        self.segments.insert(bisect_right(self.segments, segment.start, key=_start), segment)

    def _sweep(self) -> None:
        for segment in [segment for segment in self.segments if segment.base() is None]:
            self.segments.remove(segment)
            _end(segment)


def _start(segment: _MappedSegment) -> int:
    return segment.start


def _end(segment: _MappedSegment) -> None:
    segment.close()
    for ended in segment.readers:
        ended(segment.number)


def _available() -> int:
    """Bytes that can be had without the kernel having to end a process for them."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
