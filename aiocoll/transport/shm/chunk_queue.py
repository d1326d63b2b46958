"""A chunk queue: the chunks of one large operation at a time, in order, in memory that stays in the cache.

While one operation holds the queue, others go through the frame ring; the reader takes chunks only for the operation
they belong to. So an operation that its reader has not entered delays no other one.

    word 0  number of the chunk in the queue, counted from 1; written last
    word 1  id of the group
    word 2  id of the operation
    word 3  where the chunk is: 0 in the queue, else the number of a segment of the writer's (`registered_memory`)
    word 4  its offset in the segment
    word 5  fingerprint
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.errors import ProtocolError
from aiocoll.transport.shared_memory import Segment
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import CHUNKS, LINE, Direction
from aiocoll.transport.shm.region import SharedRegion
from aiocoll.transport.shm.segment_sharing import SegmentSharing

__all__ = ["ChunkQueueReader", "ChunkQueueWriter", "Chunks"]

#: In word 3: the memory is its owner's again, who may have overwritten the chunk. No segment has this number.
_VOID = (1 << 64) - 1


class _QueueEnd:
    """What both ends know: where the chunks are."""

    __slots__ = ("_full", "_lines", "_memory", "_order", "_places", "_taken", "_words", "_writer_waiting")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._order, self._full = fences
        self._writer_waiting = direction.chunk_writer_waiting
        self._taken = direction.chunks_taken
        self._lines = [(direction.lines >> 3) + number * LINE // 8 for number in range(CHUNKS)]
        self._places = [direction.chunks + number * direction.chunk_nbytes for number in range(CHUNKS)]


class ChunkQueueWriter(_QueueEnd):
    """The writer's end.

    Attributes:
        nbytes: of the largest chunk.
        holder: who uses the queue; None if nobody.
        tainted: an operation has failed, of which chunks are left in the queue that may never be read.
    """

    __slots__ = ("_number", "_ready", "_region", "holder", "nbytes", "tainted")

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        self.nbytes = direction.chunk_nbytes
        self.holder: object = None
        self.tainted = False
        self._region = region
        self._ready = False
        super().__init__(memoryview(region.memory), direction, fences)
        self._number = 0

    @property
    def number(self) -> int:
        """How many chunks have been put."""
        return self._number

    def take(self, holder: object) -> bool:
        """Reserve the queue for `holder`; False if it is not available.

        The first time, its memory is reserved, which takes half a millisecond for chunks of 256 KiB.
        """
        if self.holder is not None or (self.tainted and self._words[self._taken] != self._number):
            return False
        if not self._ready and not self._reserve():
            return False
        self.tainted = False
        self.holder = holder
        return True

    def _reserve(self) -> bool:
        self._ready = self._region.reserve(self._places[0], self._places[-1] + self.nbytes)
        return self._ready

    def leave(self, *, failed: bool) -> None:
        """Let others use the queue."""
        self.holder = None
        self.tainted = failed

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview) -> bool:
        """Copy the next chunk into the queue; False if there is no room, and the reader will then wake this rank."""
        if not self.is_taken(self._number - CHUNKS + 1):
            return False
        place = self._places[self._number % CHUNKS]
        self._memory[place : place + chunk.nbytes] = chunk
        self._announce(identity, group, fingerprint, 0, 0)
        return True

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int) -> bool:
        """As `put`, of a chunk that is read in place; it has to stay as it is until it is taken, or `void`."""
        if not self.is_taken(self._number - CHUNKS + 1):
            return False
        self._announce(identity, group, fingerprint, segment, offset)
        return True

    def is_taken(self, number: int) -> bool:
        """Whether the reader is done with the first `number` chunks; if not, it will wake this rank."""
        words = self._words
        if words[self._taken] >= number:
            return True
        words[self._writer_waiting] = 1
        self._full()
        return words[self._taken] >= number

    def void(self, identity: int, group: int) -> None:
        """Tell the reader that what a failed operation points to may change from now on."""
        words = self._words
        for number in range(words[self._taken], self._number):
            line = self._lines[number % CHUNKS]
            if words[line + 3] and words[line + 2] == identity and words[line + 1] == group:
                words[line + 3] = _VOID
        self._full()

    def _announce(self, identity: int, group: int, fingerprint: int, segment: int, offset: int) -> None:
        words, line = self._words, self._lines[self._number % CHUNKS]
        words[line + 1] = group
        words[line + 2] = identity
        words[line + 3] = segment
        words[line + 4] = offset
        words[line + 5] = fingerprint
        if self._order is not None:
            self._order()
        self._number += 1
        words[line] = self._number


class ChunkQueueReader(_QueueEnd):
    """The reader's end."""

    __slots__ = ("_last", "_next", "_over")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        super().__init__(memory, direction, fences)
        self._next = 1
        self._over: set[int] = set()
        #: By released group, the number of its last chunk, which waits behind chunks that are still to be read.
        self._last: dict[int, int] = {}

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the next chunk, if it is for an operation of a group; -1 if not."""
        words, line = self._words, self._lines[(self._next - 1) % CHUNKS]
        if words[line] != self._next:
            return -1
        if self._order is not None:
            self._order()
        return words[line + 5] if words[line + 2] == identity and words[line + 1] == group else -1

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the next chunk where it lies, until `free`."""
        return np.frombuffer(self._memory, dtype, count, self._places[(self._next - 1) % CHUNKS])

    def place(self) -> tuple[int, int]:
        """Return the writer's segment in which the next chunk is, and its offset; (0, 0) if `read` has it."""
        line = self._lines[(self._next - 1) % CHUNKS]
        return self._words[line + 3], self._words[line + 4]

    def is_void(self) -> bool:
        """Whether the next chunk may have been overwritten, before this call or while it was read."""
        if self._order is not None:
            self._order()
        return self._words[self._lines[(self._next - 1) % CHUNKS] + 3] == _VOID

    def free(self) -> bool:
        """Be done with the next chunk; whether its writer may have to be woken."""
        if self._order is not None:
            self._order()
        words = self._words
        words[self._taken] = self._next
        self._next += 1
        self._full()
        if words[self._writer_waiting]:
            words[self._writer_waiting] = 0
            return True
        return False

    def end(self, group: int) -> None:
        """Know that a group is over: what is, or will be, written for it has no reader."""
        self._over.add(group)

    def release(self, group: int) -> None:
        """Forget that a group is over when its last chunk is freed: nothing more is written for it."""
        words, numbers = self._words, range(self._next, self._next + CHUNKS)
        lines = {number: self._lines[(number - 1) % CHUNKS] for number in numbers}
        left = [number for number, line in lines.items() if words[line] == number and words[line + 1] == group]
        if left:
            self._last[group] = left[-1]
        else:
            self._over.discard(group)

    def reclaim(self) -> tuple[bool, bool]:
        """Be done with what comes next for groups that are over.

        Returns:
            Whether there was any, and whether its writer may have to be woken.
        """
        words = self._words
        freed = wanted = False
        while words[line := self._lines[(self._next - 1) % CHUNKS]] == self._next:
            if self._order is not None:
                self._order()
            if words[line + 1] not in self._over:
                break
            freed = True
            wanted = self.free() or wanted
        if self._last:
            for group, last in list(self._last.items()):
                if last < self._next:
                    del self._last[group]
                    self._over.discard(group)
        return freed, wanted


class Chunks:
    """The chunk queues of a link and the segments that they point to: this rank writes one queue, and reads the other.

    To the peer go `take`, `put` or `point` for each chunk, and `leave`; from the peer come `look`, `read`, `is_void`
    and `free` for each.

    Args:
        writer: the queue to the peer.
        reader: the queue from the peer.
        sharing: of segments.
        peer: the other rank.
        wake: wakes the peer.
        refuse: called with an error if the peer points to memory that it has not shared.
    """

    __slots__ = ("_peer", "_refuse", "_sharing", "_wake", "reader", "writer")

    def __init__(
        self,
        writer: ChunkQueueWriter,
        reader: ChunkQueueReader,
        sharing: SegmentSharing,
        peer: int,
        wake: Callable[[], object],
        refuse: Callable[[Exception], object],
    ) -> None:
        self.writer = writer
        self.reader = reader
        self._sharing = sharing
        self._peer = peer
        # None after `close`.
        self._wake: Callable[[], object] | None = wake
        self._refuse: Callable[[Exception], object] | None = refuse

    @property
    def number(self) -> int:
        """How many chunks have been put."""
        return self.writer.number

    def take(self, holder: object) -> bool:
        """Reserve the queue to the peer for `holder`; False if it is not available."""
        return self.writer.take(holder)

    def leave(self, *, failed: bool) -> None:
        """Let others use the queue to the peer; `failed`: chunks may be in it that are never read."""
        self.writer.leave(failed=failed)

    def can_map(self, segment: Segment) -> bool:
        """Return whether the peer has mapped `segment`, which is offered to it if it has not been."""
        return self._sharing.can_map(segment)

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview) -> bool:
        """Copy the next chunk into the queue; False if there is no room, and the peer will then wake this rank."""
        return self.writer.put(identity, group, fingerprint, chunk)

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int) -> bool:
        """As `put`, of a chunk that is read in place: it has to stay as it is until it is taken, or `void`."""
        return self.writer.point(identity, group, fingerprint, segment, offset)

    def is_taken(self, number: int) -> bool:
        """Return whether the peer is done with the first `number` chunks; if not, it will wake this rank."""
        return self.writer.is_taken(number)

    def void(self, identity: int, group: int) -> None:
        """Report to the peer that what a failed operation points to may change from now on."""
        self.writer.void(identity, group)

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the peer's next chunk, if it is for an operation of a group; -1 if not."""
        return self.reader.look(identity, group)

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any] | None:
        """Return the next chunk where it lies, until it is freed; None if it is not to be had any more."""
        segment, offset = self.reader.place()
        if not segment:
            return self.reader.read(dtype, count)
        found = self._sharing.read(segment, offset, dtype, count)
        if found is None and not self.reader.is_void() and self._refuse is not None:
            self._refuse(ProtocolError(f"rank {self._peer} pointed to memory that it has not shared"))
        return found

    def is_void(self) -> bool:
        """Return whether the next chunk may have been overwritten, before this call or while it was read."""
        return self.reader.is_void()

    def free(self) -> bool:
        """Be done with the next chunk; return whether its writer may have to be woken."""
        return self.reader.free()

    def reclaim(self) -> bool:
        """Free the next chunks as long as they are of groups that are over; return whether there were any."""
        freed, wanted = self.reader.reclaim()
        if wanted and self._wake is not None:
            self._wake()
        return freed

    def purge(self, group: int) -> None:
        """Free what the peer has put, or will put, for a group that is over."""
        self.reader.end(group)
        self.reclaim()

    def release(self, group: int) -> None:
        """Expect nothing more for a group that is over."""
        self.reader.release(group)

    def close(self) -> None:
        """Wake the peer and refuse chunks no more; chunks can still be read."""
        self._wake = self._refuse = None
