"""Chunk queue: a ring in shared memory for the chunks of one large operation at a time.

While one operation holds the queue, others use the frame ring. The reader takes chunks only for the operation that they
belong to. A sender may leave the queue before the reader has entered the operation. The next operation gets the queue
only if the reader can read the chunks ahead of it without another call. That holds if the queue is empty, if the reader
has begun to read the last operation, or if both are ordered operations of one group, which the reader enters in this
order. So an operation that its reader has not entered delays no other operation.

The writer describes each chunk in a line:

    word 0  number of the chunk in the queue, counted from 1; written last
    word 1  id of the group
    word 2  id of the operation
    word 3  place of the chunk: 0 for the queue, else the number of a segment of the writer's (`registered_memory`)
    word 4  its offset in the segment
    word 5  fingerprint
    word 6  bytes of the message that contains the chunk
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

#: Value of word 3 in the line that describes a chunk, if the writer may have overwritten the chunk in its segment. No
#: segment has this number.
_VOID = (1 << 64) - 1
#: A number greater than any operation id.
_NEVER = (1 << 64) - 1


class _QueueEnd:
    """Base class of both ends of a chunk queue, which computes the positions of chunks.

    Attributes:
        layout: offsets in bytes of the lines and of the chunks, size and number of the chunks, and the indices of two
            words: the number of chunks taken, and whether the writer waits for space.
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
    """The writing end of a chunk queue.

    Attributes:
        nbytes: maximum size of a chunk, in bytes.
    """

    __slots__ = ("_region", "nbytes")

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        self.nbytes = direction.chunk_nbytes
        self._region = region
        super().__init__(memoryview(region.memory), direction, fences)

    @property
    def number(self) -> int:
        """Return the number of chunks written to the queue so far."""
        return self.state[CHUNK_NUMBER]

    def take(self, identity: int, group: int, *, ordered: bool = False) -> bool:
        """Reserve the queue for an operation of a group; return False if the queue is not available.

        The first call reserves the memory of the queue, which takes half a millisecond per MiB.

        Args:
            identity: id of the operation.
            group: id of the operation's group.
            ordered: whether all ranks enter the operation after those of the group with a smaller id.
        """
        if not self._is_free(identity, group, ordered) or not self.reserve():
            return False
        state = self.state
        state[CHUNK_HOLDER], state[CHUNK_HOLDER_GROUP], state[CHUNK_FIRST] = identity, group, state[CHUNK_NUMBER]
        return True

    def _is_free(self, identity: int, group: int, ordered: bool) -> bool:
        """Return whether no operation holds the queue, and the reader will read all remaining chunks."""
        state = self.state
        if state[CHUNK_HOLDER]:
            return False
        taken = self._words[self._taken]
        if taken == state[CHUNK_NUMBER] or taken > state[CHUNK_FIRST]:
            return True
        return ordered and state[CHUNK_HOLDER_GROUP] == group and state[CHUNK_LAST] < identity

    def reserve(self) -> bool:
        """Allocate the queue's memory pages; return False if the host has none left."""
        state = self.state
        if not state[CHUNK_READY]:
            state[CHUNK_READY] = self._region.reserve(self._places[0], self._places[-1] + self.nbytes)
        return bool(state[CHUNK_READY])

    def leave(self, *, failed: bool) -> None:
        """Release the queue for other operations. `failed` means that chunks may remain in it that are never read."""
        state = self.state
        state[CHUNK_LAST], state[CHUNK_HOLDER] = state[CHUNK_HOLDER], 0
        if failed:
            state[CHUNK_LAST], state[CHUNK_FIRST] = _NEVER, state[CHUNK_NUMBER]

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview, length: int = 0) -> bool:
        """Copy the next chunk into the queue; return False if the queue is full. The reader later wakes this rank."""
        number = self.state[CHUNK_NUMBER]
        if not self.is_taken(number - self._count + 1):
            return False
        place = self._places[number % self._count]
        self._memory[place : place + chunk.nbytes] = chunk
        self._announce(identity, group, fingerprint, 0, 0, length)
        return True

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int, length: int = 0) -> bool:
        """Write a reference to the next chunk, which must not change until it is taken or `invalidate` is called."""
        if not self.is_taken(self.state[CHUNK_NUMBER] - self._count + 1):
            return False
        self._announce(identity, group, fingerprint, segment, offset, length)
        return True

    def is_taken(self, number: int) -> bool:
        """Return whether the reader has taken the first `number` chunks. If not, the reader will wake this rank."""
        words = self._words
        if words[self._taken] >= number:
            return True
        words[self._writer_waiting] = 1
        self._full()
        return words[self._taken] >= number

    def invalidate(self, identity: int, group: int) -> None:
        """Mark chunks written by reference as invalid: their operation has failed, and their memory may change now."""
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
    """The reading end of a chunk queue."""

    __slots__ = ("_closed_groups", "_last_chunks")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        super().__init__(memory, direction, fences)
        self.state[CHUNK_NUMBER] = 1
        self._closed_groups: set[int] = set()
        #: For each released group, the number of its last chunk. Earlier chunks may be unread, too.
        self._last_chunks: dict[int, int] = {}

    @property
    def _next(self) -> int:
        return self.state[CHUNK_NUMBER]

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the next chunk if the chunk is for this operation of this group, otherwise -1."""
        words, number = self._words, self.state[CHUNK_NUMBER]
        line = self._lines[(number - 1) % self._count]
        if words[line] != number:
            return -1
        if self._order is not None:
            self._order()
        return words[line + 5] if words[line + 2] == identity and words[line + 1] == group else -1

    def head(self) -> tuple[int, tuple[int, int, int]] | None:
        """Return the next chunk's number, operation, group and fingerprint; None if there is no chunk."""
        words, number = self._words, self._next
        line = self._lines[(number - 1) % self._count]
        if words[line] != number:
            return None
        if self._order is not None:
            self._order()
        return number, (words[line + 2], words[line + 1], words[line + 5])

    def length(self) -> int:
        """Return the length in bytes of the whole message to which the next chunk belongs."""
        return self._words[self._lines[(self._next - 1) % self._count] + 6]

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return a view of the next chunk in the queue, valid until `free`."""
        return np.frombuffer(self._memory, dtype, count, self._places[(self._next - 1) % self._count])

    def place(self) -> tuple[int, int]:
        """Return segment number and offset of the next chunk in the writer's memory; (0, 0) if it is in the queue."""
        line = self._lines[(self._next - 1) % self._count]
        return self._words[line + 3], self._words[line + 4]

    def is_void(self) -> bool:
        """Return whether the next chunk may have been overwritten before or while this rank read it."""
        if self._order is not None:
            self._order()
        return self._words[self._lines[(self._next - 1) % self._count] + 3] == _VOID

    def free(self) -> bool:
        """Free the next chunk; return whether the writer waits for a wake-up."""
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
        """Record that a group is closed, so that its current and later chunks are freed without being read."""
        self._closed_groups.add(group)
        self.state[CHUNK_GROUPS_OVER] = len(self._closed_groups)

    def release(self, group: int) -> None:
        """Forget a closed group as soon as its last chunk is freed. The peer must write no more chunks for it."""
        words, numbers = self._words, range(self._next, self._next + self._count)
        lines = {number: self._lines[(number - 1) % self._count] for number in numbers}
        left = [number for number, line in lines.items() if words[line] == number and words[line + 1] == group]
        if left:
            self._last_chunks[group] = left[-1]
        else:
            self._forget(group)

    def reclaim(self) -> tuple[bool, bool]:
        """Free the next chunks, as long as they belong to closed groups.

        Returns:
            Whether any chunk was freed, and whether the writer waits for a wake-up.
        """
        words = self._words
        freed = wanted = False
        while words[line := self._lines[(self._next - 1) % self._count]] == self._next:
            if self._order is not None:
                self._order()
            if words[line + 1] not in self._closed_groups:
                break
            freed = True
            wanted = self.free() or wanted
        if self._last_chunks:
            for group, last in list(self._last_chunks.items()):
                if last < self._next:
                    del self._last_chunks[group]
                    self._forget(group)
        return freed, wanted

    def _forget(self, group: int) -> None:
        self._closed_groups.discard(group)
        self.state[CHUNK_GROUPS_OVER] = len(self._closed_groups)


class Chunks:
    """The two chunk queues of a link (this rank writes one and reads the other), with the segments that they refer to.

    For the peer, this rank calls `take`, then `put` or `point` for each chunk, then `leave`. For each chunk from the
    peer it calls `look`, `read`, `is_void` and `free`.

    Args:
        writer: the queue to the peer.
        reader: the queue from the peer.
        sharing: the link's exchange of segments.
        peer: the rank at the other end.
        wake: wakes the peer.
        refuse: called with an error if the peer refers to memory that it has not shared.
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
        # `_wake` and `_refuse` are None after `close`.
        self._wake: Callable[[], object] | None = wake
        self._refuse: Callable[[Exception], object] | None = refuse

    @property
    def number(self) -> int:
        """Return the number of chunks written to the peer so far."""
        return self.writer.number

    @property
    def nbytes(self) -> int:
        """Return the maximum size of a chunk, in bytes."""
        return self.writer.nbytes

    def connect(self, native: Any, memory: memoryview) -> None:
        """Connect the accelerator to the queues in `memory`, the link's region."""
        writer, reader = self.writer, self.reader
        native.connect_queues(memory, writer.layout, writer.state, reader.layout, reader.state, writer.reserve)

    def take(self, identity: int, group: int, *, ordered: bool) -> bool:
        """Reserve the queue to the peer for an operation of a group; return False if the queue is not available."""
        return self.writer.take(identity, group, ordered=ordered)

    def leave(self, *, failed: bool) -> None:
        """Release the queue to the peer. `failed` means that chunks may remain in it that are never read."""
        self.writer.leave(failed=failed)

    def can_map(self, segment: Segment) -> bool:
        """Return whether the peer has mapped `segment`. Send the peer the segment's descriptor on the first call."""
        return self._sharing.can_map(segment)

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview, length: int) -> bool:
        """Copy the next chunk of a message of `length` bytes into the queue to the peer.

        Returns:
            False if the queue is full. The peer then wakes this rank later.
        """
        return self.writer.put(identity, group, fingerprint, chunk, length)

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int, length: int) -> bool:
        """Write a reference to the next chunk, which must not change until it is taken or `invalidate` is called."""
        return self.writer.point(identity, group, fingerprint, segment, offset, length)

    def length(self) -> int:
        """Return the length in bytes of the whole message to which the peer's next chunk belongs."""
        return self.reader.length()

    def is_taken(self, number: int) -> bool:
        """Return whether the peer has taken the first `number` chunks. If not, the peer will wake this rank."""
        return self.writer.is_taken(number)

    def invalidate(self, identity: int, group: int) -> None:
        """Mark chunks written by reference as invalid: their operation has failed, and their memory may change now."""
        self.writer.invalidate(identity, group)

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the peer's next chunk if it is for this operation of this group, otherwise -1."""
        return self.reader.look(identity, group)

    def head(self) -> tuple[int, tuple[int, int, int]] | None:
        """Return the number, operation, group and fingerprint of the peer's next chunk; None if there is no chunk.

        Chunks of closed groups do not count.
        """
        self.reclaim()
        return self.reader.head()

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any] | None:
        """Return a view of the peer's next chunk, valid until `free`; None if this rank cannot read its memory now."""
        segment, offset = self.reader.place()
        if not segment:
            return self.reader.read(dtype, count)
        found = self._sharing.read(segment, offset, dtype, count)
        if found is None and not self.reader.is_void() and self._refuse is not None:
            self._refuse(
                ProtocolError(f"rank {self._peer} sent the address of a chunk in memory that it has not shared")
            )
        return found

    def is_void(self) -> bool:
        """Return whether the peer's next chunk may have been overwritten before or while this rank read it."""
        return self.reader.is_void()

    def free(self) -> bool:
        """Free the peer's next chunk; return whether the peer waits for a wake-up."""
        return self.reader.free()

    def reclaim(self) -> bool:
        """Free the peer's next chunks, as long as they belong to closed groups; return whether any was freed."""
        freed, wanted = self.reader.reclaim()
        if wanted and self._wake is not None:
            self._wake()
        return freed

    def purge(self, group: int) -> None:
        """Free the peer's current and later chunks for a closed group."""
        self.reader.end(group)
        self.reclaim()

    def release(self, group: int) -> None:
        """Forget a closed group for which the peer writes no more chunks."""
        self.reader.release(group)

    def close(self) -> None:
        """Drop the callbacks that wake the peer and reject its chunks. Chunks can still be read."""
        self._wake = self._refuse = None
