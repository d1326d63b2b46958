"""One direction of a link in shared memory: a ring of entries, and the bytes that they speak of.

An entry is one cache line:

     0  u64  stamp    number of the entry, counted from 1; written last
     8  u64  place    of the payload in the region, in bytes; or, with the top bit, of a payload that lies elsewhere: in
                      the segment of the writer's that has this number, or with 0 in the memory of its process; the
                      next bit is set if what is there may have changed
    16       header   of the frame, 40 bytes
    56       payload, if it has at most 8 bytes; or
    56  u64  address  of the payload, in the segment or in the process

Larger payloads lie in the data area, each in one piece, in the order of their entries; the reader tells how many
entries it has taken, which frees them in that order. While the reader keeps up, the writer begins at the front of the
area again and again, where the cache is warm. What lies beyond is reserved when it is used for the first time.

The writer writes the entries, the data and the word `writer_waiting`, the reader the word `taken`. Each of the two
words has a line of its own.
"""

from __future__ import annotations

import struct
from collections import deque

from aiocoll.transport.frame import HEADER
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import ENTRIES, FIRST, LINE, Direction
from aiocoll.transport.shm.region import SharedRegion, no_memory

__all__ = ["ADDRESS", "ELSEWHERE", "ENTRY", "PLACE", "VOID", "RingWriter"]

_INLINE = 56
_INLINE_NBYTES = LINE - _INLINE
#: Words of an entry, from its begin.
PLACE, ADDRESS = 1, 7
#: Bits of a place: it is not in the region; what is there may have changed.
ELSEWHERE, VOID = 1 << 63, 1 << 62

#: place, then the fields of the frame's header.
ENTRY = struct.Struct("<Q" + HEADER.format.lstrip("<"))
_pack = struct.Struct("<Q40s").pack_into


class RingWriter:
    """The writer's end of one direction.

    Args:
        region: of the link.
        direction: where things are.
        fences: of this machine.
    """

    __slots__ = ("_area", "_data", "_full", "_head", "_memory", "_order", "_ready", "_region", "_ring", "_sent",
                 "_spans", "_taken", "_words", "_writer_waiting")  # fmt: skip

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        self._region = region
        memory = self._memory = memoryview(region.memory)
        self._words = memory.cast("Q")
        self._order, self._full = fences
        self._ring = direction.ring
        self._area = direction.data
        self._data = direction.data_nbytes
        self._ready = FIRST
        self._writer_waiting = direction.writer_waiting
        self._taken = direction.taken
        self._sent = 0
        self._head = 0
        # Payloads that may not have been read: number of the entry, start in the area; oldest first.
        self._spans: deque[tuple[int, int]] = deque()

    def put(self, header: bytes, payload: memoryview | None) -> bool:
        """Write one frame; False if there is no space.

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
                start = self._find(nbytes, taken)
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
        """Write one frame whose payload stays where it is; return the entry's number, 0 if there is no space.

        Args:
            header: of the frame.
            segment: number of the segment in which it lies; 0 if it is in no segment.
            address: where it begins there, or in this process.
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

    def void(self, number: int) -> None:
        """Tell the reader, if it has not taken that entry, that its payload may change from now on."""
        if self.taken < number:
            self._words[(self._ring + (number - 1) % ENTRIES * LINE >> 3) + PLACE] |= VOID
            self._full()

    @property
    def taken(self) -> int:
        """Entries the reader is done with."""
        return self._words[self._taken]

    def request_wakeup(self) -> None:
        """Ask the reader to ring the doorbell once it has freed space."""
        self._words[self._writer_waiting] = 1
        self._full()

    def cancel_wakeup(self) -> None:
        """This end waits no more."""
        self._words[self._writer_waiting] = 0

    def _find(self, nbytes: int, taken: int) -> int:
        """Return where `nbytes` fit in one piece in the area; -1 if nowhere as yet."""
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
        if start + nbytes > self._ready and not self._reserve(start + nbytes):
            if spans:
                return -1  # once all is read, it may fit in what is there
            raise no_memory()
        self._head = start + (nbytes + LINE - 1) // LINE * LINE
        return start

    def _reserve(self, nbytes: int) -> bool:
        """Reserve the first `nbytes` of the area, or twice what was reserved, if that is more."""
        ready = min(self._data, max(nbytes, 2 * self._ready))
        if not self._region.reserve(self._area + self._ready, self._area + ready):
            return False
        self._ready = ready
        return True
