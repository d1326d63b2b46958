"""Frame ring: one direction of a link in shared memory, as a ring of entries that describe frames and payloads.

An entry is one cache line:

     0  u64  stamp    number of the entry, counted from 1; written last
     8  u64  place    offset of the payload in the region, in bytes. If the top bit is set, the payload is elsewhere:
                      the value is the number of one of the writer's segments, or 0 for the memory of its process.
                      The next bit is set if that payload may have changed.
    16       header   of the frame, 40 bytes
    56       payload, if it has at most 8 bytes; or
    56  u64  address  of a payload elsewhere, in the segment or in the process

Each larger payload is contiguous in the data area, and payloads follow the order of their entries. The reader publishes
the number of entries that it has taken, which frees their payloads in that order. While the reader keeps up, the writer
starts at the front of the area again and again, where the cache is warm. The rest of the area is reserved at first use.

The writer writes the entries, the data and the word `writer_waiting`. The reader writes the word `taken`. Each of the
two words has a line of its own.
"""

from __future__ import annotations

import struct
from collections import deque

from aiocoll.transport.frame import HEADER
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import ENTRIES, FIRST, LINE, Direction
from aiocoll.transport.shm.region import SharedRegion, no_memory_error

__all__ = ["ADDRESS", "ELSEWHERE", "ENTRY", "PLACE", "VOID", "RingWriter"]

_INLINE = 56
_INLINE_NBYTES = LINE - _INLINE
#: Indices of the words `place` and `address` within an entry.
PLACE, ADDRESS = 1, 7
#: Flags in the word `place` of an entry. ELSEWHERE: the payload is outside the region. VOID: a payload outside the
#: region may have changed.
ELSEWHERE, VOID = 1 << 63, 1 << 62

#: An entry: the word `place`, then the fields of the frame header.
ENTRY = struct.Struct("<Q" + HEADER.format.lstrip("<"))
_pack = struct.Struct("<Q40s").pack_into


class RingWriter:
    """The writing end of a frame ring.

    Args:
        region: the link's region.
        direction: the layout of this direction.
        fences: the memory fences of this machine.
    """

    __slots__ = (
        "_area",
        "_data",
        "_full",
        "_head",
        "_memory",
        "_order",
        "_region",
        "_reserved",
        "_ring",
        "_sent",
        "_spans",
        "_taken",
        "_words",
        "_writer_waiting",
    )  # fmt: skip

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        self._region = region
        memory = self._memory = memoryview(region.memory)
        self._words = memory.cast("Q")
        self._order, self._full = fences
        self._ring = direction.ring
        self._area = direction.data
        self._data = direction.data_nbytes
        self._reserved = FIRST
        self._writer_waiting = direction.writer_waiting
        self._taken = direction.taken
        self._sent = 0
        self._head = 0
        # Payloads that the reader may not have read yet, oldest first, each as entry number and start in the data area.
        self._spans: deque[tuple[int, int]] = deque()

    def put(self, header: bytes, payload: memoryview | None) -> bool:
        """Write a frame with its payload; return False if the ring has no space.

        Raises:
            OSError: the host has no memory left for a frame of this size.
        """
        words, number = self._words, self._sent
        taken = words[self._taken]
        if number - taken >= ENTRIES:
            return False
        at = self._ring + number % ENTRIES * LINE
        number += 1
        if payload is None:
            place = at
        else:
            nbytes = payload.nbytes
            if nbytes <= _INLINE_NBYTES:
                place = at + _INLINE
            else:
                start = self._find_space(nbytes, taken)
                if start < 0:
                    return False
                self._spans.append((number, start))
                place = self._area + start
            self._memory[place : place + nbytes] = payload
        _pack(self._memory, at + 8, place, header)
        if self._order is not None:
            self._order()
        words[at >> 3] = self._sent = number
        return True

    def point(self, header: bytes, segment: int, address: int) -> int:
        """Write a frame whose payload is not copied; return the number of its entry, or 0 if the ring has no space.

        Args:
            header: the frame's header.
            segment: number of the segment that contains the payload; 0 if no segment does.
            address: start of the payload in the segment, or its address in this process.
        """
        words, number = self._words, self._sent
        if number - words[self._taken] >= ENTRIES:
            return 0
        at = self._ring + number % ENTRIES * LINE
        number += 1
        _pack(self._memory, at + 8, ELSEWHERE | segment, header)
        word = at >> 3
        words[word + ADDRESS] = address
        if self._order is not None:
            self._order()
        words[word] = self._sent = number
        return number

    def invalidate(self, number: int) -> None:
        """Mark the payload of entry `number` as invalid, unless it has been taken: its memory may change now."""
        if self.taken < number:
            self._words[(self._ring + (number - 1) % ENTRIES * LINE >> 3) + PLACE] |= VOID
            self._full()

    @property
    def taken(self) -> int:
        """Return the number of entries that the reader has taken."""
        return self._words[self._taken]

    def request_wakeup(self) -> None:
        """Request that the reader rings this rank's doorbell when it has freed space."""
        self._words[self._writer_waiting] = 1
        self._full()

    def cancel_wakeup(self) -> None:
        """Withdraw the request that the reader rings this rank's doorbell."""
        self._words[self._writer_waiting] = 0

    def _find_space(self, nbytes: int, taken: int) -> int:
        """Return the start of `nbytes` contiguous free bytes in the data area; -1 if there are none now."""
        spans = self._spans
        while spans and spans[0][0] <= taken:
            spans.popleft()
        start, end = self._head, self._data
        if not spans:
            start = 0
        else:
            oldest = spans[0][1]
            if start <= oldest:
                end = oldest
            elif start + nbytes > end:
                start, end = 0, oldest
        if start + nbytes > end:
            return -1
        if start + nbytes > self._reserved and not self._reserve(start + nbytes):
            if spans:
                return -1  # the frame may fit into the allocated part when everything has been read
            raise no_memory_error()
        self._head = start + (nbytes + LINE - 1) // LINE * LINE
        return start

    def _reserve(self, nbytes: int) -> bool:
        """Allocate pages for the first `nbytes` of the data area, or for twice the allocated size if that is more."""
        ready = min(self._data, max(nbytes, 2 * self._reserved))
        if not self._region.reserve(self._area + self._reserved, self._area + ready):
            return False
        self._reserved = ready
        return True
