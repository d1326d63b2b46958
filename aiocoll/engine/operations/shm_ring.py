"""The executor of large arrays in shared memory: a ring of ranks, each with a chunk queue to its right neighbour.

The schedule is that of `aiocoll.algorithms.flat.ring`. In steps 0 to p-2, a rank adds the data from the left to a part
of its tensor. In steps p-1 to 2p-3, it copies finished parts. In both, it passes on the result to the right. Parts are
divided into chunks of the queue's size. All ranks know the order of the chunks, so a chunk needs no header and no
lookup, and is passed on while it is in the cache:

    step 0    0 1 2 3 4              p = 2, 5 chunks per part: the order is by columns, from the bottom up
    step 1        0 1 2 3 4

Cost: 2(p-1) steps, 2n(p-1)/p bytes written and as many read per rank. Other collectives use the same executor
    (`Relay`):
an allgather takes p-1 steps, a broadcast goes along the chain of ranks, and further collectives of two ranks take one
step. If the queue is in use by another operation or not available, the operation sends frames instead, from its first
chunk to its last: each step is one message, which grows by chunks.

For a tensor in memory that peers can read (`aiocoll.transport.shared_memory`), the queue carries positions of chunks
instead of chunks, which saves half of the written bytes. The right neighbour then reads a chunk in place, after this
rank has published its position. The chunk must not be overwritten before:

- By this rank: a chunk of step s may be overwritten in step s+p-1, by the sum that arrives from the left. That sum has
  gone around the ring. The right neighbour, as the first rank on the way, has sent it only after it had read this
  chunk.
- By the caller: the operation ends only after the right neighbour has read everything.

If the operation fails before that, it marks the unread positions as void. A reader checks that mark after each chunk,
and stops.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Region
from aiocoll.completion import Completion
from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.plan import EAGER_WINDOW, Plan
from aiocoll.engine.operations.relay import Relay, take_chunk
from aiocoll.engine.operations.signature import KEYED
from aiocoll.errors import ProtocolError
from aiocoll.runtime import BUDGET
from aiocoll.transport.base import SharedMemoryLink
from aiocoll.transport.shared_memory import Segment

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MOST_PIECES", "ShmRing", "order"]

#: Number of chunks by which each step lags behind the previous step, because the left neighbour needs time to reduce a
#: chunk.
LAG = 2
#: Maximum number of chunks in an operation, because the order of the chunks is kept in memory.
MOST_PIECES = 1 << 16


@functools.lru_cache(maxsize=64)
def order(steps: int, chunks: int, behind: int = 1) -> tuple[tuple[int, int, int], ...]:
    """Return the chunks in transfer order: step, chunk, and position of the chunk that must arrive first, or -1.

    Args:
        steps: number of steps.
        chunks: number of chunks per step.
        behind: number of steps between the arrival of a chunk and passing it on.
    """
    found: list[tuple[int, int, int]] = []
    place: dict[tuple[int, int], int] = {}
    for column in range(chunks + LAG * (steps - 1)):
        for step in range(min(steps - 1, column // LAG), -1, -1):
            chunk = column - LAG * step
            if chunk < chunks:
                place[step, chunk] = len(found)
                found.append((step, chunk, place.get((step - behind, chunk), -1)))
    return tuple(found)


class ShmRing(Operation):
    """The operation of one rank in one collective that has a `Relay`.

    The arguments are those of `ProgramExecutor`.
    """

    __slots__ = (
        "_arrays",
        "_copied",
        "_framed",
        "_holds",
        "_left",
        "_messages",
        "_nbytes",
        "_offset",
        "_plan",
        "_pointed",
        "_put",
        "_puts",
        "_received",
        "_relay",
        "_right",
        "_segment",
        "_taken",
        "_takes",
        "_unsent",
        "_views",
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
        assert plan.relay is not None
        self._relay: Relay = plan.relay
        self._arrays = arrays
        self._views: dict[int, memoryview] = {}
        size, rank = len(comm.ranks), comm.rank
        self._right, self._left = (rank + 1) % size, (rank - 1) % size
        self._puts = order(len(plan.relay.puts), plan.relay.chunks(plan.relay.puts), plan.relay.behind)
        self._takes = order(len(plan.relay.takes), plan.relay.chunks(plan.relay.takes))
        # Bytes per chunk. The queue has smaller chunks if the card (published data) of a peer is wrong about the C
        # accelerator.
        self._nbytes = plan.relay.chunk * plan.itemsize
        self._holds = False
        self._put = 0
        self._taken = 0
        # Number of elements that the local copy has copied so far.
        self._copied = 0
        # For steps that use frames instead of the chunk queue, by step: the message to the right neighbour, which grows
        # by chunks; the memory for the message from the left neighbour; and the number of its bytes that have arrived.
        self._messages: dict[int, Message] = {}
        self._framed: dict[int, memoryview] = {}
        self._received: dict[int, int] = {}
        # Number of unsent bytes in messages to the right neighbour. An empty message counts as one byte.
        self._unsent = 0
        registered_memory = comm.registered_memory
        place = (
            registered_memory.find(arrays[0])
            if registered_memory is not None and registered_memory.segments and not comm.is_on_all_cards("native")
            else None
        )
        self._segment: Segment | None = None if place is None else place[0]
        self._offset = 0 if place is None else place[1]
        # Queue number of the last chunk for which only the address in this rank's memory was sent, not a copy.
        self._pointed = 0

    @property
    def reduces(self) -> bool:
        """Return whether the collective reduces."""
        return self._plan.kernel is not None

    def enter(self) -> None:
        """Reserve the chunk queue to the right neighbour, if it is free, and start."""
        self._take_queue()
        self.comm.polling.lookers[self] = None
        self.look()

    def adopt(self, put: int, taken: int, copied: int, holds: bool) -> None:
        """Continue an operation that the C accelerator has begun; called instead of `enter`.

        Args:
            put: number of chunks that were sent to the right.
            taken: number of chunks that were received from the left.
            copied: number of copied elements of the local copy.
            holds: whether the operation has reserved the chunk queue.
        """
        self._put, self._taken, self._copied, self._holds = put, taken, copied, holds
        self.comm.in_flight.adopt(self)
        if self.timeout != self.comm.default_timeout:
            self.comm.endpoint.watch.entered(self.comm, self)
        if not holds and not put:
            self._take_queue()
        self.comm.polling.lookers[self] = None
        self.comm.call_soon(self.look)

    def _take_queue(self) -> None:
        channel = self.comm.channels[self._right]
        link = channel.shared if self._puts else None
        self._holds = (
            link is not None
            and link is channel.link
            and link.chunks.nbytes >= self._nbytes
            and link.chunks.take(self.id, self.comm.id, ordered=self.id < KEYED)
        )

    def look(self) -> bool:
        """Send chunks while the queue has room, and receive arrived chunks; return whether any data moved."""
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        moved = False
        while not self.done:
            going = self._put_next()
            if self._taken < len(self._takes) and self._take_next():
                going = True
            if self.done:
                return True
            if self._relay.copy is not None and not going:
                going = self._copy_next(*self._relay.copy)
            if self._is_complete() and not self._unsent and self._is_read():
                self._end()
                if self._takes:
                    self.set_waited_for(self._right if self._pointed else self._left)
                self.succeed(self.completion.value)
                return True
            if not going:
                return moved
            moved = True
            if ticks() > deadline:
                self.schedule_advance()
                break
        return moved

    def advance(self) -> None:
        """Continue to send and receive chunks in a later callback."""
        self.look()

    def _is_complete(self) -> bool:
        copy = self._relay.copy
        has_copied = copy is None or self._copied == copy[0].count
        return has_copied and self._put == len(self._puts) and self._taken == len(self._takes)

    def _copy_next(self, target: Region, source: Region) -> bool:
        if self._copied == target.count:
            return False
        chunk = self._copied // self._relay.chunk
        piece = self._piece(target, chunk)
        piece[:] = self._piece(source, chunk)
        self._copied += len(piece)
        return True

    # -- sending to the right

    def _put_next(self) -> bool:
        if self._put == len(self._puts):
            return False
        step, chunk, before = self._puts[self._put]
        if before >= self._taken:
            return False
        channel = self.comm.channels[self._right]
        if self._holds:
            link = channel.shared
            assert link is not None
            if not self._put_in_queue(link, self._relay.puts[step], chunk):
                return False
            self._put += 1
            if self._put == len(self._puts):
                self._leave_queue(failed=False)
                link.lane_writer.count_chunked()
            if link is channel.link:
                link.announce()
        else:
            self._put += 1  # count first, because `enqueue` may call `sent` at once
            self._send_chunk(step, chunk)
        return True

    def _send_chunk(self, step: int, chunk: int) -> None:
        """Send a chunk in frames, as the next part of a step's message."""
        if not chunk:
            message = Message(self, step, step, self._bytes(self._relay.puts[step]), 0)
            self._unsent += message.total or 1
        elif step in self._messages:
            message = self._messages.pop(step)
        else:
            return  # this step's message has fewer chunks than the longest message
        message.limit = min((chunk + 1) * self._nbytes, message.total)
        if message.limit < message.total:
            self._messages[step] = message
        self.comm.channels[self._right].enqueue(message)

    def _put_in_queue(self, link: SharedMemoryLink, region: Region, chunk: int) -> bool:
        queue, itemsize = link.chunks, self._plan.itemsize
        length = region.count * itemsize
        if self._segment is None or not queue.can_map(self._segment):
            view = self._bytes(region)[chunk * self._nbytes : (chunk + 1) * self._nbytes]
            return queue.put(self.id, self.comm.id, self.fingerprint, view, length)
        place = self._segment.number, self._offset + (region.start + chunk * self._relay.chunk) * itemsize
        if not queue.point(self.id, self.comm.id, self.fingerprint, *place, length):
            return False
        self._pointed = queue.number
        return True

    def _is_read(self) -> bool:
        """Return whether the right neighbour has read all chunks, so that the array may be overwritten."""
        if not self._pointed:
            return True
        link = self.comm.channels[self._right].shared
        return link is None or link.chunks.is_taken(self._pointed)

    def sent(self, message: Message, nbytes: int) -> None:
        """Record that `nbytes` bytes of a message have been sent."""
        if not self.done:
            self._unsent -= nbytes if message.total else 1
            if not self._unsent:
                self.look()

    # -- receiving from the left neighbour

    def _take_next(self) -> bool:
        step, chunk, _ = self._takes[self._taken]
        region = self._relay.takes[step]
        place = self._piece(region, chunk)
        total = region.count * self._plan.itemsize
        if self._received.get(step, -1) >= min((chunk + 1) * self._nbytes, total):
            if not self._is_placed:
                start = chunk * self._nbytes
                incoming = self._framed[step][start : start + place.nbytes]
                self._compute(step, chunk, place, np.frombuffer(incoming, self._plan.storage))
        elif not take_chunk(
            self,
            self._left,
            self._nbytes,
            lambda length: place.nbytes if length == total else -1,
            lambda incoming: self._compute(step, chunk, place, incoming.view(self._plan.storage)),
        ):
            return False
        self._taken += 1
        return True

    def _compute(self, step: int, chunk: int, place: NDArray[Any], incoming: NDArray[Any]) -> None:
        sources = self._relay.sources
        if step >= len(sources):
            place[:] = incoming
            return
        own = self._piece(sources[step], chunk)
        kernel = self._plan.kernel
        assert kernel is not None
        # If both inputs are NaN, NumPy's in-place code path for a single element returns the other NaN. So write a
        # single element to a temporary array.
        out = place if len(place) > 1 else np.empty_like(place)
        try:
            kernel.combine(incoming, own, out)
            if step == len(sources) - 1 and kernel.finalize is not None:
                kernel.finalize(out)
        except Exception as error:  # a user's reduce function may raise any exception
            self.comm.revoke_after_error(self, error, "its reduce function raised ")
        if out is not place:
            place[:] = out

    @property
    def _is_placed(self) -> bool:
        """Return whether messages that arrive in frames are stored directly in the array, as they are only copied."""
        return len(self._relay.takes) == 1 and not self._relay.sources

    def _room(self, step: int) -> memoryview:
        """Return the memory for a step's message that arrives in frames."""
        room = self._framed.get(step)
        if room is None:
            region = self._relay.takes[step]
            # Use `np.empty`, because a large bytearray would be filled with zeros in one long step.
            new = (
                self._bytes(region) if self._is_placed else np.empty(region.count * self._plan.itemsize, np.uint8).data
            )
            room = self._framed[step] = new
            self._received[step] = 0
        return room

    def route(self, peer: int, step: int, offset: int, total: int, length: int) -> memoryview | None:
        """Return the memory for a segment of a message in frames; None if the message is not expected."""
        if peer != self._left or step >= len(self._relay.takes):
            return None
        room = self._room(step)
        start = self._received[step]
        if total != room.nbytes & 0xFFFFFFFF or offset != start & 0xFFFFFFFF or start + length > room.nbytes:
            return None
        return room[start : start + length]

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Keep a segment of a message that arrives in frames, until the ring needs the segment's chunk."""
        if peer != self._left or step >= len(self._relay.takes):
            return False
        room = self._room(step)
        if total != room.nbytes & 0xFFFFFFFF:
            return False
        start = self._received[step]
        if start + length > room.nbytes:
            raise ProtocolError(f"rank {peer} sent more than the {room.nbytes} bytes of message {step}")
        if payload is not None:
            room[start : start + length] = payload
        self._received[step] = start + length
        if start == 0 and room.nbytes > EAGER_WINDOW:
            self.promise(peer)
        if (link := self.comm.channels[peer].shared) is not None:
            link.chunks.reclaim()  # unread chunks may have filled the queue, so that the peer had to send a frame
        self.look()
        return True

    # -- the end

    def algorithm(self) -> str:
        """Return the algorithm of the plan."""
        return self._plan.algorithm

    def needs(self, peer: int) -> bool:
        """Read the chunks that `peer` has sent, then return whether data to or from `peer` is missing."""
        while not self.done and self.look():
            pass
        if self.done:
            return False
        if peer == self._left and self._taken < len(self._takes):
            return True
        return peer == self._right and (self._put < len(self._puts) or bool(self._unsent) or not self._is_read())

    def awaited_ranks(self) -> list[int]:
        """Return the left neighbour until its data has arrived, then the right neighbour until it has read all data."""
        if self._taken < len(self._takes):
            return [self._left]
        return [] if self._put == len(self._puts) and self._is_read() else [self._right]

    def fail(self, error: BaseException) -> None:
        """Fail the operation with `error`."""
        if not self.done:
            self._leave_queue(failed=True)
            if self._pointed and (link := self.comm.channels[self._right].shared) is not None:
                link.chunks.invalidate(self.id, self.comm.id)
            self._end()
        super().fail(error)

    def _end(self) -> None:
        self._messages.clear()  # messages refer to this operation
        self.comm.polling.lookers.pop(self, None)

    def _leave_queue(self, *, failed: bool) -> None:
        if self._holds:
            self._holds = False
            link = self.comm.channels[self._right].shared
            if link is not None:
                link.chunks.leave(failed=failed)

    def _bytes(self, region: Region) -> memoryview:
        """Return a view of the bytes of a region."""
        view = self._views.get(region.buffer)
        if view is None:
            view = self._views[region.buffer] = byte_view(self._arrays[region.buffer])
        itemsize = self._plan.itemsize
        return view[region.start * itemsize : region.stop * itemsize]

    def _piece(self, region: Region, chunk: int) -> NDArray[Any]:
        """Return a view of the elements of one chunk of a region, which may be empty."""
        start = region.start + chunk * self._relay.chunk
        piece: NDArray[Any] = self._arrays[region.buffer][start : min(start + self._relay.chunk, region.stop)]
        return piece
