"""A link between two processes of one host, through memory that both map.

          rank 0                    shared                        rank 1
    write -> copy once ->  [entry|entry|...][ data  ]  -> place, reduce: straight from there
    poll  <-               [entry|entry|...][ data  ]  <- write

The unix socket over which the memory was passed stays open. It reports the end of the other process and an orderly end
of the link, and carries offers of memory segments (`segment_sharing`). The `doorbell` wakes the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiocoll.errors import ProtocolError
from aiocoll.process import PidFd, peer_process
from aiocoll.runtime import BUDGET, Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Sink
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.frame import SEGMENT, FrameKind, Header
from aiocoll.transport.shared_memory import MOST_BY_REFERENCE
from aiocoll.transport.shm.chunk_queue import ChunkQueueReader, ChunkQueueWriter, Chunks
from aiocoll.transport.shm.doorbell import Doorbell, PeerDoorbell, ring_all
from aiocoll.transport.shm.layout import ENTRIES, LINE, LinkLayout
from aiocoll.transport.shm.outbox import PeerOutbox
from aiocoll.transport.shm.process_memory import OwnMemory, PeerMemory
from aiocoll.transport.shm.references import InPlace, ReferenceReader, ReferenceWriter, UnreadableError
from aiocoll.transport.shm.region import SharedRegion
from aiocoll.transport.shm.ring import ELSEWHERE, ENTRY, VOID, RingWriter
from aiocoll.transport.shm.segment_sharing import SegmentSharing
from aiocoll.transport.shm.slots import LaneWriter

if TYPE_CHECKING:
    from aiocoll.native import core

__all__ = ["PIECE_TIME", "LinkParts", "OwnPart", "PeerPart", "ShmLink"]

#: If a peer has been reading the same piece of memory for this many seconds, it counts as stopped. A normal read is
#: much shorter.
PIECE_TIME = 500e-6
_KINDS = frozenset(FrameKind)
_NOTHING = memoryview(b"")
#: Words that `poll` reads after the link has closed. They never announce a frame.
_SILENCE = memoryview(bytes(8)).cast("Q")
_unpack = ENTRY.unpack_from


class OwnPart(NamedTuple):
    """The part of a link that belongs to this rank: its doorbell and outbox, and its lane for the peer.

    Attributes:
        layout: the layout of the link's region.
        doorbell: this rank's doorbell, referenced until `drop`.
        lane: this rank's lane for the peer, open until `drop`.
        rank: this rank.
        peer: the rank at the other end.
        memory: the memory of this process; None if the ends must not read each other's memory.
    """

    layout: LinkLayout
    doorbell: Doorbell
    lane: LaneWriter
    rank: int
    peer: int
    memory: OwnMemory | None

    def drop(self) -> None:
        """Release this link's references to the lane and the doorbell."""
        self.doorbell.outbox.close_lane(self.lane)
        self.doorbell.drop()


class PeerPart(NamedTuple):
    """The peer's part of a link: its doorbell and its outbox."""

    doorbell: PeerDoorbell
    outbox: PeerOutbox

    def native_lanes(self, own: OwnPart) -> core.PeerLanes | None:
        """Return the accelerator's view of the lanes in both directions; None without the accelerator."""
        doorbell = own.doorbell
        return self.outbox.native_lanes(doorbell.outbox, own.lane, self.doorbell.eventfd, doorbell.poll_soon)

    def close(self) -> None:
        """Close the peer's doorbell and outbox, and unmap their memory."""
        self.doorbell.close()
        self.outbox.close()


class LinkParts(NamedTuple):
    """The parts of a link on which its two ends have agreed.

    Attributes:
        region: the memory that both ends write.
        direction: index of the region's direction that this rank writes.
        own: this rank's part.
        peer: the peer's part.
        peer_memory: the memory of the peer's process; None if this process cannot read it.
        is_read: whether the peer can read the memory of this process.
        both_native: whether both processes run the accelerator.
    """

    region: SharedRegion
    direction: int
    own: OwnPart
    peer: PeerPart
    peer_memory: PeerMemory | None
    is_read: bool
    both_native: bool


class ShmLink:
    """An end of a link in shared memory; see `aiocoll.transport.base.SharedMemoryLink`.

    Owns the stream, the peer's doorbell and a reference to its own.
    """

    __slots__ = (
        "_at",
        "_closed",
        "_doorbell",
        "_end",
        "_ending",
        "_failed",
        "_memory",
        "_next",
        "_order",
        "_out",
        "_own",
        "_peer_doorbell",
        "_pieces",
        "_pieces_since",
        "_read_by_peer",
        "_receiving",
        "_refusing",
        "_ring",
        "_runtime",
        "_started",
        "_stream",
        "_taken",
        "_waiting",
        "_words",
        "_writer_waiting",
        "announce",
        "chunks",
        "common_reader",
        "common_writer",
        "kind",
        "lane_reader",
        "lane_writer",
        "native",
        "peer",
        "peer_outbox",
        "reference_reader",
        "references",
        "segment_sharing",
        "sink",
    )

    sink: Sink
    carrier = "shm"

    def __init__(
        self, runtime: Runtime, stream: ByteStream, parts: LinkParts, in_place: InPlace, peer: int, kind: ConnKind
    ) -> None:
        self.peer = peer
        self.kind = kind
        self._runtime = runtime
        self._stream = stream
        self._own = own = parts.own
        self._doorbell = own.doorbell
        self._peer_doorbell = parts.peer.doorbell
        #: Wakes the peer if it sleeps. May be called only while the link is open.
        self.announce = parts.peer.doorbell.ring
        fences = own.doorbell.fences
        outgoing, incoming = own.layout.directions[parts.direction], own.layout.directions[1 - parts.direction]
        if not parts.both_native:
            outgoing, incoming = outgoing.with_large_chunks(), incoming.with_large_chunks()
        region = parts.region
        memory = self._memory = memoryview(region.memory)
        self._words = memory.cast("Q")
        self._out = RingWriter(region, outgoing, fences)
        self.common_writer, self.lane_writer = own.doorbell.outbox.common, own.lane
        outbox = self.peer_outbox = parts.peer.outbox
        self.common_reader, self.lane_reader = outbox.common, outbox.lane
        self.lane_writer.connect(outbox.words)
        self.native = self.lane_writer.native = parts.peer.native_lanes(own)
        self.segment_sharing = SegmentSharing(stream, peer)
        self.chunks = Chunks(
            ChunkQueueWriter(region, outgoing, fences),
            ChunkQueueReader(memory, incoming, fences),
            self.segment_sharing,
            peer,
            self.announce,
            self.refuse,
        )
        if self.native is not None:
            self.chunks.connect(self.native, memory)
        self._order = fences.order
        self._writer_waiting = incoming.writer_waiting
        self._taken = incoming.taken
        self._read_by_peer = outgoing.pieces
        self._ring = incoming.ring
        self._end = incoming.data_end
        self._waiting: deque[tuple[bytes, memoryview | None]] = deque()
        self.references = ReferenceWriter(
            self._out, self._waiting, self.segment_sharing, in_place, parts.peer.doorbell, attach=parts.is_read
        )
        self.reference_reader = ReferenceReader(
            self.segment_sharing, parts.peer_memory, in_place, memory.cast("Q"), incoming.pieces
        )
        # The last value seen of the peer's counter of pieces read in place, and the time at which it was first seen.
        self._pieces, self._pieces_since = 0, 0.0
        self._next = 1
        # Index of the word in which the peer will write the number of the next frame.
        self._at = self._ring >> 3
        self._started = False
        self._receiving = False
        self._ending = False
        self._failed = False
        self._closed = False
        # Set after the first invalid frame. From then on, this end reads no frames.
        self._refusing = False

    @property
    def writable(self) -> bool:
        """Return whether no frame waits for space in the frame ring."""
        return not self._waiting and not self.references.full

    @property
    def shared(self) -> ShmLink:
        """Return this link, because it uses shared memory."""
        return self

    @property
    def closed(self) -> bool:
        """Return whether the link is closed."""
        return self._closed

    def peer_process(self) -> PidFd | None:
        """Return a handle of the process at the other end."""
        return peer_process(self._stream.sock)

    def start(self) -> None:
        """Start reading."""
        self._started = True
        self._stream.start_reading(self._on_socket_readable)
        self._doorbell.add(self)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send a frame; return whether the ring had space for it. Otherwise the frame waits."""
        if self._closed or self._ending:
            return True
        try:
            put = not self._waiting and self._out.put(header, payload)
        except OSError as error:
            put = False
            self._on_no_memory(error)
        if put:
            self._peer_doorbell.ring()
            return True
        self._waiting.append((header, payload))
        self._out.request_wakeup()
        # Poll soon: the peer may have freed space before it could see the wake-up request. `write` itself must not call
        # `drained`.
        self._runtime.call_soon(self.poll)
        return False

    def poll(self) -> bool:
        """Deliver received frames for at most `BUDGET` seconds, and send waiting ones; return whether any moved."""
        moved = self._flush() if self._waiting else False
        if self.references.unread:
            moved = self._report_read() or self.is_being_read() or moved
        if self._words[self._at] != self._next or not self._started or self._receiving:
            return moved
        self._receiving = True
        try:
            self._receive()
        except UnreadableError as error:
            self._on_lost(error)
        except Exception as error:
            self._refuse(error)
        finally:
            self._receiving = self._refusing
        return True

    def is_being_read(self) -> bool:
        """Return whether the peer is reading memory of this rank in place at this moment."""
        pieces = 0 if self._closed else self._words[self._read_by_peer]
        if not pieces % 2:
            return False
        now = self._runtime.ticks()
        if pieces != self._pieces:
            self._pieces, self._pieces_since = pieces, now
        return now - self._pieces_since < PIECE_TIME

    def announce_to(self, links: Sequence[ShmLink]) -> None:
        """Wake the peers of several links, with one memory fence for all of them."""
        ring_all([link._peer_doorbell for link in links])

    def shares_core(self) -> bool:
        """Return whether the peer ran on this rank's core when the peer last waited for long."""
        return not self._closed and self._peer_doorbell.shares_core()

    def divert(self) -> None:
        """Do nothing, because every payload arrives in one piece."""

    def finish(self) -> None:
        """Send the waiting frames, then shut down the sending side of the link's socket."""
        self._ending = self.references.ended = True
        if not self._waiting and not self._closed:
            self._shutdown()

    def fail(self, error: Exception) -> None:
        """Close the link and report `error` to the sink, like a failed read."""
        self._on_lost(error)

    def refuse(self, error: Exception) -> None:
        """Stop reading in the next loop iteration: the peer's data is invalid, but an operation may be using it."""
        self._runtime.call_soon(self._refuse_once, error)

    def close(self) -> None:
        """Close the link's socket, and leave the shared memory to the peer."""
        if self._closed:
            return
        self._closed = True
        self.chunks.close()
        self.segment_sharing.close()
        self._doorbell.remove(self)
        if self.native is not None:
            self.native.close()
        self.peer_outbox.detach()
        self._own.drop()
        self._peer_doorbell.close()
        self._waiting.clear()
        self._stream.close()
        # Drop the views. The memory is unmapped with its last view.
        self._memory, self._words, self._at = _NOTHING, _SILENCE, 0
        self.references.close()
        del self._out

    def purge(self, group: int, has_left: bool) -> None:
        """Free the peer's posts and chunks for a closed group; later ones too, unless the peer has left the group."""
        self.peer_outbox.purge(group)
        self.chunks.purge(group)
        if has_left:
            self.peer_outbox.release(group)
            self.chunks.release(group)

    def on_departure(self, group: int) -> None:
        """Withdraw the unread posts of this rank for a group that the peer has left."""
        if not self._closed:
            self.common_writer.withdraw(self.lane_writer, group)

    def unmap(self) -> None:
        """Unmap the peer's segments, after `close`. Its slots can still be read."""
        self.segment_sharing.forget()

    def forget(self) -> None:
        """Release all views of the memory, after `close`, so that references to this link do not keep it mapped."""
        self.segment_sharing.forget()
        self.peer_outbox.close()
        del self.common_writer, self.lane_writer, self.common_reader, self.lane_reader, self.peer_outbox
        del self.chunks, self.reference_reader, self._own

    def _receive(self) -> None:
        words, memory, order, deliver = self._words, self._memory, self._order, self.sink.deliver
        ticks = self._runtime.ticks
        deadline = ticks() + BUDGET
        while True:
            if order is not None:
                order()
            entry = _unpack(memory, (self._at << 3) + 8)
            place, length, number = entry[0], entry[8], self._next
            if place & ELSEWHERE:
                if not self._take_reference(place & ~(ELSEWHERE | VOID), entry[1:], deadline):
                    return
            elif length > SEGMENT or entry[1] not in _KINDS or not self._ring <= place <= self._end - length:
                raise ProtocolError(f"rank {self.peer} wrote an invalid frame: kind {entry[1]}, length {length}")
            else:
                deliver(self, entry[1:], memory[place : place + length] if length else _NOTHING)
            if self._closed:
                return
            self._next = number + 1
            self._at = (self._ring + number % ENTRIES * LINE) >> 3
            if order is not None:
                order()
            words[self._taken] = number
            if words[self._at] != self._next:
                break
            if ticks() > deadline:
                self._runtime.call_soon(self.poll)
                break
        self._doorbell.fences.full()
        if words[self._writer_waiting]:
            self._peer_doorbell.ring()

    def _take_reference(self, segment: int, header: Header, deadline: float) -> bool:
        """Deliver a frame by reference; return False if the next loop iteration must read the rest of its payload."""
        if header[0] != FrameKind.DATA or not 0 < header[7] <= MOST_BY_REFERENCE:
            raise ProtocolError(f"rank {self.peer} wrote an invalid frame: kind {header[0]}, length {header[7]}")
        ticks = self._runtime.ticks
        entry = self._words[self._at : self._at + LINE // 8]
        taken = self.reference_reader.take(self, segment, entry, header, lambda: ticks() > deadline)
        if not taken and not self._closed:
            self._runtime.call_soon(self.poll)
        return taken

    def _report_read(self) -> bool:
        """Notify the operations whose payloads the peer has read in place; return whether there were any."""
        references = self.references
        was_full = references.full
        found = references.collect()
        if found and not self._closed:
            if not references.unread and not self._waiting:
                self._out.cancel_wakeup()
            if was_full and self.writable:
                self.sink.drained(self)
        return found

    def _flush(self) -> bool:
        if self._failed:
            return False
        waiting, put = self._waiting, self._out.put
        moved = False
        try:
            while waiting and put(*waiting[0]):
                waiting.popleft()
                moved = True
        except OSError as error:
            self._on_no_memory(error)
            return moved
        if moved:
            self._peer_doorbell.ring()
        if waiting:
            return moved
        if not self.references.unread:
            self._out.cancel_wakeup()
        if self._ending:
            self._shutdown()
        self.sink.drained(self)
        return True

    def _on_no_memory(self, error: OSError) -> None:
        """Close the link soon, because there is no memory for a frame. Until then, send no later frame."""
        self._failed = True
        self._runtime.call_soon(self._on_lost, error)

    def _shutdown(self) -> None:
        try:
            self._stream.shutdown()
        except OSError:
            self._runtime.call_soon(self._on_lost, None)  # the peer has closed its end of the socket, too

    def _on_socket_readable(self) -> None:
        """Handle a readable socket: a message about segments, or the end of the link. Frames may be left in memory."""
        try:
            if self.segment_sharing.receive():
                return
            error: Exception | None = None
        except (BlockingIOError, InterruptedError):
            return
        except OSError as failure:
            error = None if self._ending else failure
        except Exception as nonsense:
            self._refuse(nonsense)
            return
        while self.poll():
            pass
        self._on_lost(error)

    def _on_lost(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            if not self._refusing:
                self.sink.lost(self, error)

    def _refuse_once(self, error: Exception) -> None:
        if not self._refusing:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Stop reading after invalid data, and report the error to the sink. At the second error, close the link."""
        if self._refusing:
            self.close()
        elif not self._closed:
            self._refusing = self._receiving = True
            self.sink.lost(self, error)
