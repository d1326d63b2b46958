"""A chunk queue: the chunks of one large operation at a time, in order, in memory that stays in the cache.

While one operation holds the queue, others go through the frame ring; the reader takes chunks only for the operation
they belong to. A sender may leave the queue before the reader has entered the operation. The next operation gets the
queue only if the reader needs no call to read the chunks ahead: the queue is empty, the reader has begun to read the
last operation, or both operations are ordered ones of one group, which the reader enters in this order. So an operation
that its reader has not entered delays no other one.

    word 0  number of the chunk in the queue, counted from 1; written last
    word 1  id of the group
    word 2  id of the operation
    word 3  where the chunk is: 0 in the queue, else the number of a segment of the writer's (`registered_memory`)
    word 4  its offset in the segment
    word 5  fingerprint
    word 6  bytes of the message that it is a part of
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.errors import ProtocolError
from aiocoll.native.layout import (
    CHUNK_FIRST,
    CHUNK_GROUPS_OVER,
    CHUNK_HOLDER,
    CHUNK_HOLDER_GROUP,
    CHUNK_LAST,
    CHUNK_NUMBER,
    CHUNK_READY,
    CHUNK_STATE,
)
from aiocoll.transport.shared_memory import Segment
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import LINE, Direction
from aiocoll.transport.shm.region import SharedRegion
from aiocoll.transport.shm.segment_sharing import SegmentSharing

__all__ = ["ChunkQueueReader", "ChunkQueueWriter", "Chunks"]

#: In word 3: the memory is its owner's again, who may have overwritten the chunk. No segment has this number.
_VOID = (1 << 64) - 1
#: Larger than any operation's id.
_NEVER = (1 << 64) - 1


class _QueueEnd:
    """What both ends know: where the chunks are.

    Attributes:
        layout: offsets in bytes of the lines and of the chunks, size and number of the chunks, and two words, of which
            the first says how many chunks are taken, and the second that the writer waits for room.
        state: numbers that the accelerator uses, too; see `aiocoll.native.layout`.
    """

    __slots__ = (
        "_count",
        "_full",
        "_lines",
        "_memory",
        "_order",
        "_places",
        "_taken",
        "_words",
        "_writer_waiting",
        "layout",
        "state",
    )

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._order, self._full = fences
        self._writer_waiting = direction.chunk_writer_waiting
        self._taken = direction.chunks_taken
        self._count = count = direction.chunks_count
        self._lines = [(direction.lines >> 3) + number * LINE // 8 for number in range(count)]
        self._places = [direction.chunks + number * direction.chunk_nbytes for number in range(count)]
        chunks = direction.chunks, direction.chunk_nbytes, count
        self.layout = direction.lines, *chunks, self._taken, self._writer_waiting
        self.state = array("Q", bytes(8 * CHUNK_STATE))


class ChunkQueueWriter(_QueueEnd):
    """The writer's end.

    Attributes:
        nbytes: of the largest chunk.
    """

    __slots__ = ("_region", "nbytes")

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        self.nbytes = direction.chunk_nbytes
        self._region = region
        super().__init__(memoryview(region.memory), direction, fences)

    @property
    def number(self) -> int:
        """How many chunks have been put."""
        return self.state[CHUNK_NUMBER]

    def take(self, identity: int, group: int, *, ordered: bool = False) -> bool:
        """Reserve the queue for an operation of a group; False if it is not available.

        The first time, its memory is reserved, which takes half a millisecond for a MiB.

        Args:
            identity: of the operation.
            group: of the operation.
            ordered: all ranks enter the operation after those of the group with a smaller id.
        """
        if not self._is_free(identity, group, ordered) or not self.reserve():
            return False
        state = self.state
        state[CHUNK_HOLDER], state[CHUNK_HOLDER_GROUP], state[CHUNK_FIRST] = identity, group, state[CHUNK_NUMBER]
        return True

    def _is_free(self, identity: int, group: int, ordered: bool) -> bool:
        """Return whether no operation holds the queue, and the reader will read what is left in it."""
        state = self.state
        if state[CHUNK_HOLDER]:
            return False
        taken = self._words[self._taken]
        if taken == state[CHUNK_NUMBER] or taken > state[CHUNK_FIRST]:
            return True
        return ordered and state[CHUNK_HOLDER_GROUP] == group and state[CHUNK_LAST] < identity

    def reserve(self) -> bool:
        """Make the memory of the queue; False if the host has none."""
        state = self.state
        if not state[CHUNK_READY]:
            state[CHUNK_READY] = self._region.reserve(self._places[0], self._places[-1] + self.nbytes)
        return bool(state[CHUNK_READY])

    def leave(self, *, failed: bool) -> None:
        """Let others use the queue."""
        state = self.state
        state[CHUNK_LAST], state[CHUNK_HOLDER] = state[CHUNK_HOLDER], 0
        if failed:
            state[CHUNK_LAST], state[CHUNK_FIRST] = _NEVER, state[CHUNK_NUMBER]

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview, length: int = 0) -> bool:
        """Copy the next chunk into the queue; False if there is no room, and the reader will then wake this rank."""
        number = self.state[CHUNK_NUMBER]
        if not self.is_taken(number - self._count + 1):
            return False
        place = self._places[number % self._count]
        self._memory[place : place + chunk.nbytes] = chunk
        self._announce(identity, group, fingerprint, 0, 0, length)
        return True

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int, length: int = 0) -> bool:
        """As `put`, of a chunk that is read in place; it has to stay as it is until it is taken, or `void`."""
        if not self.is_taken(self.state[CHUNK_NUMBER] - self._count + 1):
            return False
        self._announce(identity, group, fingerprint, segment, offset, length)
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
        for number in range(words[self._taken], self.state[CHUNK_NUMBER]):
            line = self._lines[number % self._count]
            if words[line + 3] and words[line + 2] == identity and words[line + 1] == group:
                words[line + 3] = _VOID
        self._full()

    def _announce(self, identity: int, group: int, fingerprint: int, segment: int, offset: int, length: int) -> None:
        words, number = self._words, self.state[CHUNK_NUMBER]
        line = self._lines[number % self._count]
        words[line + 1] = group
        words[line + 2] = identity
        words[line + 3] = segment
        words[line + 4] = offset
        words[line + 5] = fingerprint
        words[line + 6] = length
        if self._order is not None:
            self._order()
        self.state[CHUNK_NUMBER] = words[line] = number + 1


class ChunkQueueReader(_QueueEnd):
    """The reader's end."""

    __slots__ = ("_last", "_over")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        super().__init__(memory, direction, fences)
        self.state[CHUNK_NUMBER] = 1
        self._over: set[int] = set()
        #: By released group, the number of its last chunk, which waits behind chunks that are still to be read.
        self._last: dict[int, int] = {}

    @property
    def _next(self) -> int:
        return self.state[CHUNK_NUMBER]

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the next chunk, if it is for an operation of a group; -1 if not."""
        words, number = self._words, self.state[CHUNK_NUMBER]
        line = self._lines[(number - 1) % self._count]
        if words[line] != number:
            return -1
        if self._order is not None:
            self._order()
        return words[line + 5] if words[line + 2] == identity and words[line + 1] == group else -1

    def head(self) -> tuple[int, tuple[int, int, int]] | None:
        """Return the number of the next chunk, and its operation, group and fingerprint; None if there is none."""
        words, number = self._words, self._next
        line = self._lines[(number - 1) % self._count]
        if words[line] != number:
            return None
        if self._order is not None:
            self._order()
        return number, (words[line + 2], words[line + 1], words[line + 5])

    def length(self) -> int:
        """Return the bytes of the message that the next chunk is a part of."""
        return self._words[self._lines[(self._next - 1) % self._count] + 6]

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the next chunk where it lies, until `free`."""
        return np.frombuffer(self._memory, dtype, count, self._places[(self._next - 1) % self._count])

    def place(self) -> tuple[int, int]:
        """Return the writer's segment in which the next chunk is, and its offset; (0, 0) if `read` has it."""
        line = self._lines[(self._next - 1) % self._count]
        return self._words[line + 3], self._words[line + 4]

    def is_void(self) -> bool:
        """Whether the next chunk may have been overwritten, before this call or while it was read."""
        if self._order is not None:
            self._order()
        return self._words[self._lines[(self._next - 1) % self._count] + 3] == _VOID

    def free(self) -> bool:
        """Be done with the next chunk; whether its writer may have to be woken."""
        if self._order is not None:
            self._order()
        words = self._words
        words[self._taken] = self.state[CHUNK_NUMBER]
        self.state[CHUNK_NUMBER] += 1
        self._full()
        if words[self._writer_waiting]:
            words[self._writer_waiting] = 0
            return True
        return False

    def end(self, group: int) -> None:
        """Know that a group is over: what is, or will be, written for it has no reader."""
        self._over.add(group)
        self.state[CHUNK_GROUPS_OVER] = len(self._over)

    def release(self, group: int) -> None:
        """Forget that a group is over when its last chunk is freed: nothing more is written for it."""
        words, numbers = self._words, range(self._next, self._next + self._count)
        lines = {number: self._lines[(number - 1) % self._count] for number in numbers}
        left = [number for number, line in lines.items() if words[line] == number and words[line + 1] == group]
        if left:
            self._last[group] = left[-1]
        else:
            self._forget(group)

    def reclaim(self) -> tuple[bool, bool]:
        """Be done with what comes next for groups that are over.

        Returns:
            Whether there was any, and whether its writer may have to be woken.
        """
        words = self._words
        freed = wanted = False
        while words[line := self._lines[(self._next - 1) % self._count]] == self._next:
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
                    self._forget(group)
        return freed, wanted

    def _forget(self, group: int) -> None:
        self._over.discard(group)
        self.state[CHUNK_GROUPS_OVER] = len(self._over)


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

    @property
    def nbytes(self) -> int:
        """Bytes of the largest chunk."""
        return self.writer.nbytes

    def connect(self, native: Any, memory: memoryview) -> None:
        """Let the accelerator use the queues, in the memory of the link."""
        writer, reader = self.writer, self.reader
        native.connect_queues(memory, writer.layout, writer.state, reader.layout, reader.state, writer.reserve)

    def take(self, identity: int, group: int, *, ordered: bool) -> bool:
        """Reserve the queue to the peer for an operation of a group; return whether it is available."""
        return self.writer.take(identity, group, ordered=ordered)

    def leave(self, *, failed: bool) -> None:
        """Let others use the queue to the peer; `failed`: chunks may be in it that are never read."""
        self.writer.leave(failed=failed)

    def can_map(self, segment: Segment) -> bool:
        """Return whether the peer has mapped `segment`, which is offered to it if it has not been."""
        return self._sharing.can_map(segment)

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview, length: int) -> bool:
        """Copy the next chunk, of a message of so many bytes, into the queue to the peer.

        Returns:
            False if there is no room, and the peer will then wake this rank.
        """
        return self.writer.put(identity, group, fingerprint, chunk, length)

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int, length: int) -> bool:
        """As `put`, of a chunk that is read in place: it has to stay as it is until it is taken, or `void`."""
        return self.writer.point(identity, group, fingerprint, segment, offset, length)

    def length(self) -> int:
        """Return the bytes of the message that the peer's next chunk is a part of."""
        return self.reader.length()

    def is_taken(self, number: int) -> bool:
        """Return whether the peer is done with the first `number` chunks; if not, it will wake this rank."""
        return self.writer.is_taken(number)

    def void(self, identity: int, group: int) -> None:
        """Report to the peer that what a failed operation points to may change from now on."""
        self.writer.void(identity, group)

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the peer's next chunk, if it is for an operation of a group; -1 if not."""
        return self.reader.look(identity, group)

    def head(self) -> tuple[int, tuple[int, int, int]] | None:
        """Return the number of the peer's next chunk, and its operation, group and fingerprint; None if there is none.

        Chunks of groups that are over do not count.
        """
        self.reclaim()
        return self.reader.head()

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
