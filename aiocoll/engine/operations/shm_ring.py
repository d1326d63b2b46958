"""The executor of large reductions in shared memory: a ring of ranks, each with a chunk queue to its right neighbour.

The schedule is that of `aiocoll.algorithms.flat.ring`: in steps 0 to p-2 a rank adds what comes from the left to a part
of its tensor, in steps p-1 to 2p-3 it copies finished parts; it passes on what it has added or copied. Here the parts
are divided into chunks of the queue's size, which travel in an order that all ranks know, so a chunk needs neither
header nor look-up, and is passed on while it is in the cache:

    step 0    0 1 2 3 4              p = 2, 5 chunks per part: the order is by columns, from the bottom up
    step 1        0 1 2 3 4

Cost: 2(p-1) steps, 2n(p-1)/p bytes written and as many read per rank.
If the queue is in use by another operation, or not available, the same chunks travel as frames.

For a tensor in memory that peers can read (`aiocoll.transport.shared_memory`) the queue carries no chunks, but their
positions: half of the bytes written are saved. The right neighbour then reads a chunk some time after it was put, but
before this rank overwrites it. What was put in step s is overwritten in step s+p-1, if at all, by the sum that comes
from the left; that sum has travelled around the whole ring, and each rank on the way, the right neighbour first, has
put it only after it read its input: this very chunk. Nor does the caller overwrite any, since the operation ends
only when its right neighbour has read everything. If it fails before, it voids what is not read: a reader checks for
that after each chunk it has read, and stops.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.errors import ProtocolError
from aiocoll.runtime import BUDGET
from aiocoll.transport.base import SharedMemoryLink
from aiocoll.transport.shared_memory import Segment

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MOST_PIECES", "ShmRing", "order"]

#: Columns by which a step is behind the one before: its peer needs some time to add a chunk.
LAG = 2
#: Chunks are numbered by the step of a frame's header.
MOST_PIECES = 1 << 16


@functools.lru_cache(maxsize=64)
def order(steps: int, chunks: int) -> tuple[tuple[int, int, int], ...]:
    """Return step, chunk and the number of the chunk that has to come before, or -1, in travelling order."""
    found: list[tuple[int, int, int]] = []
    place: dict[tuple[int, int], int] = {}
    for column in range(chunks + LAG * (steps - 1)):
        for step in range(min(steps - 1, column // LAG), -1, -1):
            chunk = column - LAG * step
            if chunk < chunks:
                place[step, chunk] = len(found)
                found.append((step, chunk, place.get((step - 1, chunk), -1)))
    return tuple(found)


class ShmRing(Operation):
    """One rank's part in one allreduce; arguments as for `ProgramExecutor`."""

    __slots__ = (
        "_array",
        "_bytes",
        "_framed",
        "_holds",
        "_left",
        "_length",
        "_offset",
        "_order",
        "_parts",
        "_plan",
        "_pointed",
        "_put",
        "_right",
        "_segment",
        "_taken",
        "_unsent",
    )

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        plan: Plan,
        arrays: list[NDArray[Any]],
        completion: Completion,
    ) -> None:
        super().__init__(comm, identity, plan.signature, plan.fingerprint, completion)
        self._plan = plan
        self._array = arrays[0]
        self._bytes = byte_view(self._array)
        size, rank = len(comm.ranks), comm.rank
        self._right, self._left = (rank + 1) % size, (rank - 1) % size
        self._parts = [(plan.count * part // size, plan.count * (part + 1) // size) for part in range(size)]
        self._length = comm.chunk_nbytes // plan.itemsize
        longest = max(stop - start for start, stop in self._parts)
        self._order = order(2 * (size - 1), -(-longest // self._length))
        self._holds = False
        self._put = 0
        self._taken = 0
        self._unsent = 0
        self._framed: dict[int, bytearray] | None = None
        registered_memory = comm.registered_memory
        place = (
            registered_memory.find(self._array)
            if registered_memory is not None and registered_memory.segments
            else None
        )
        self._segment: Segment | None = None if place is None else place[0]
        self._offset = 0 if place is None else place[1]
        # Number, in the queue, of the last chunk that was put by its position.
        self._pointed = 0

    def enter(self) -> None:
        """Reserve the queue, if it is free, and start."""
        channel = self.comm.channels[self._right]
        link = channel.shared
        self._holds = link is not None and link is channel.link and link.chunks.take(self)
        self.comm.polling.lookers[self] = None
        self.look()

    def look(self) -> bool:
        """Put chunks while the queue has room, take what has arrived; return whether anything moved."""
        chunks = self._order
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        moved = False
        while not self.done:
            going = self._put_next()
            if self._taken < len(chunks) and self._take_next():
                going = True
            if self.done:
                return True
            if self._put == self._taken == len(chunks) and not self._unsent and self._is_read():
                self._end()
                self.set_waited_for(self._right if self._pointed else self._left)
                self.succeed(self.completion.value)
                return True
            if not going:
                return moved
            moved = True
            if ticks() > deadline:
                self.put_off()
                break
        return moved

    def advance(self) -> None:
        """Continue in the next turn of the loop."""
        self.look()

    # -- sending to the right

    def _put_next(self) -> bool:
        if self._put == len(self._order):
            return False
        step, chunk, before = self._order[self._put]
        if before >= self._taken:
            return False
        rank, size = self.comm.rank, len(self._parts)
        start, stop = self._bounds((rank - step - 1) % size, chunk)
        itemsize = self._plan.itemsize
        view = self._bytes[start * itemsize : stop * itemsize]
        channel = self.comm.channels[self._right]
        if self._holds:
            link = channel.shared
            assert link is not None
            if not self._put_in_queue(link, start * itemsize, view):
                return False
            if link is channel.link:
                link.announce()
            self._put += 1
        else:
            # First, since `sent` may be called for this chunk within the call.
            number, self._put = self._put, self._put + 1
            self._unsent += 1
            channel.kick(Message(self, number, number, view, view.nbytes))
        if self._put == len(self._order):
            self._leave_queue(failed=False)
        return True

    def _put_in_queue(self, link: SharedMemoryLink, start: int, view: memoryview) -> bool:
        queue = link.chunks
        if self._segment is None or not queue.can_map(self._segment):
            return queue.put(self.id, self.comm.id, self.fingerprint, view)
        place = self._segment.number, self._offset + start
        if not queue.point(self.id, self.comm.id, self.fingerprint, *place):
            return False
        self._pointed = queue.number
        return True

    def _is_read(self) -> bool:
        """Whether nobody reads the tensor any more."""
        if not self._pointed:
            return True
        link = self.comm.channels[self._right].shared
        return link is None or link.chunks.is_taken(self._pointed)

    def sent(self, message: Message, nbytes: int) -> None:
        """Bytes of a frame have been sent."""
        if message.moved == message.total and not self.done:
            self._unsent -= 1
            self.look()

    # -- receiving from the left

    def _take_next(self) -> bool:
        step, chunk, _ = self._order[self._taken]
        start, stop = self._bounds((self.comm.rank - step - 2) % len(self._parts), chunk)
        count = stop - start
        framed = None if self._framed is None else self._framed.get(self._taken)
        link = self.comm.channels[self._left].shared
        if framed is not None and len(framed) == count * self._plan.itemsize:
            assert self._framed is not None
            self._compute(step, start, stop, np.frombuffer(framed, self._plan.storage))
            del self._framed[self._taken]
        elif link is None:
            return False
        elif (found := link.chunks.look(self.id, self.comm.id)) < 0:
            return link.chunks.reclaim()
        elif found != self.fingerprint:
            self.comm.mismatches.disagree(self._left, self.id, self.describe())
            return False
        else:
            incoming = link.chunks.read(self._plan.storage, count)
            if incoming is None:
                return False
            self._compute(step, start, stop, incoming)
            if self.done:  # it has failed, and its group has released the chunks
                return True
            if link.chunks.is_void():
                return False
            if link.chunks.free() and link is self.comm.channels[self._left].link:
                link.announce()
        self._taken += 1
        return True

    def _compute(self, step: int, start: int, stop: int, incoming: NDArray[Any]) -> None:
        own = self._array[start:stop]
        adding = len(self._parts) - 1
        if step >= adding:
            own[:] = incoming
            return
        kernel = self._plan.kernel
        assert kernel is not None
        # NumPy adds a single element in place differently, with another NaN if both are: so not in place.
        out = own if len(own) > 1 else np.empty_like(own)
        try:
            kernel.combine(incoming, own, out)
            if step == adding - 1 and kernel.finalize is not None:
                kernel.finalize(out)
        except Exception as error:  # raised by a user's function
            self.comm.broke(self, error, "its reduce function raised ")
        if out is not own:
            own[:] = out

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Store chunks that come in frames until it is their turn."""
        if peer != self._left or step >= len(self._order) or payload is None:
            return False
        if self._framed is None:
            self._framed = {}
        framed = self._framed.setdefault(step, bytearray())
        ring_step, chunk, _ = self._order[step]
        start, stop = self._bounds((self.comm.rank - ring_step - 2) % len(self._parts), chunk)
        if step < self._taken or len(framed) + length > (stop - start) * self._plan.itemsize:
            raise ProtocolError(f"rank {peer} sent more than piece {step} of its message")
        if (link := self.comm.channels[peer].shared) is not None:
            link.chunks.reclaim()  # unread chunks may have been the reason for the frame
        framed.extend(payload)
        self.look()
        return True

    # -- the end

    def algorithm(self) -> str:
        """Return the algorithm of the plan."""
        return self._plan.algorithm

    def needs(self, peer: int) -> bool:
        """Whether something to or from `peer` is missing, when all that it put before it left has been read."""
        while not self.done and self.look():
            pass
        if self.done:
            return False
        if peer == self._left and self._taken < len(self._order):
            return True
        return peer == self._right and (self._put < len(self._order) or bool(self._unsent) or not self._is_read())

    def awaited(self) -> list[int]:
        """Return the left neighbour while it has something to send, then the right one while it reads."""
        if self._taken < len(self._order):
            return [self._left]
        return [] if self._is_read() else [self._right]

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        if not self.done:
            self._leave_queue(failed=True)
            if self._pointed and (link := self.comm.channels[self._right].shared) is not None:
                link.chunks.void(self.id, self.comm.id)
            self._end()
        super().fail(error)

    def _end(self) -> None:
        self.comm.polling.lookers.pop(self, None)

    def _leave_queue(self, *, failed: bool) -> None:
        if self._holds:
            self._holds = False
            link = self.comm.channels[self._right].shared
            if link is not None:
                link.chunks.leave(failed=failed)

    def _bounds(self, part: int, chunk: int) -> tuple[int, int]:
        start, stop = self._parts[part]
        return min(start + chunk * self._length, stop), min(start + (chunk + 1) * self._length, stop)
