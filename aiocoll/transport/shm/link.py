"""A link between two processes of one host, through memory that both map.

          rank 0                    shared                        rank 1
    write -> copy once ->  [entry|entry|...][ data  ]  -> place, reduce: straight from there
    poll  <-               [entry|entry|...][ data  ]  <- write

The unix socket over which the memory was passed stays open: it tells when the other process is gone, that an end is in
order, and which segments of memory the other end may map (`segment_sharing`). The `doorbell` wakes the loop.
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

__all__ = ["PIECE_TIME", "Own", "Pair", "Peer", "ShmLink"]

#: Seconds for which a peer is taken to read one piece, several times what that takes: it may have been stopped.
PIECE_TIME = 500e-6
_KINDS = frozenset(FrameKind)
_NOTHING = memoryview(b"")
#: What a closed link reads: no stamp ever comes there.
_SILENCE = memoryview(bytes(8)).cast("Q")
_unpack = ENTRY.unpack_from


class Own(NamedTuple):
    """What a rank brings to a link: its doorbell with its outbox, and the lane for the peer.

    Attributes:
        layout: of the region that the link is to have.
        doorbell: held until `drop`.
        lane: open until `drop`.
        rank: this rank.
        peer: the rank at the other end.
        memory: of this process; None if the ends shall not read each other's.
    """

    layout: LinkLayout
    doorbell: Doorbell
    lane: LaneWriter
    rank: int
    peer: int
    memory: OwnMemory | None

    def drop(self) -> None:
        """Return the references."""
        self.doorbell.outbox.close_lane(self.lane)
        self.doorbell.drop()


class Peer(NamedTuple):
    """What the peer brings to a link."""

    doorbell: PeerDoorbell
    outbox: PeerOutbox

    def native_lanes(self, own: Own) -> core.PeerLanes | None:
        """Return the accelerator's view of the lanes of both; None without it."""
        doorbell = own.doorbell
        return self.outbox.native_lanes(doorbell.outbox, own.lane, self.doorbell.eventfd, doorbell.attend)

    def close(self) -> None:
        """Close and unmap all of it."""
        self.doorbell.close()
        self.outbox.close()


class Pair(NamedTuple):
    """What the two ends have agreed on.

    Attributes:
        region: the memory that both write.
        direction: of its directions, the one that is this rank's to write.
        own: what this rank brings.
        peer: what the peer brings.
        peer_memory: the memory of the peer's process; None if this one cannot read it.
        is_read: whether the peer can read the memory of this process.
        both_native: whether both processes run the accelerator.
    """

    region: SharedRegion
    direction: int
    own: Own
    peer: Peer
    peer_memory: PeerMemory | None
    is_read: bool
    both_native: bool


class ShmLink:
    """One end of a link; see `aiocoll.transport.base.SharedMemoryLink`.

    Owns the stream, the peer's doorbell and a reference to its own.
    """

    __slots__ = (
        "_at",
        "_closed",
        "_doorbell",
        "_end",
        "_ending",
        "_failed",
        "_kept",
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
        self, runtime: Runtime, stream: ByteStream, pair: Pair, in_place: InPlace, peer: int, kind: ConnKind
    ) -> None:
        self.peer = peer
        self.kind = kind
        self._runtime = runtime
        self._stream = stream
        self._own = own = pair.own
        self._doorbell = own.doorbell
        self._peer_doorbell = pair.peer.doorbell
        #: Wakes the peer, if it sleeps; only while the link is open.
        self.announce = pair.peer.doorbell.ring
        fences = own.doorbell.fences
        ours, theirs = own.layout.directions[pair.direction], own.layout.directions[1 - pair.direction]
        if not pair.both_native:
            ours, theirs = ours.with_large_chunks(), theirs.with_large_chunks()
        region = pair.region
        memory = self._memory = memoryview(region.memory)
        self._words = memory.cast("Q")
        self._out = RingWriter(region, ours, fences)
        self.common_writer, self.lane_writer = own.doorbell.outbox.common, own.lane
        outbox = self.peer_outbox = pair.peer.outbox
        self.common_reader, self.lane_reader = outbox.common, outbox.lane
        self.lane_writer.connect(outbox.words)
        self.native = self.lane_writer.native = pair.peer.native_lanes(own)
        self.segment_sharing = SegmentSharing(stream, peer)
        self.chunks = Chunks(
            ChunkQueueWriter(region, ours, fences),
            ChunkQueueReader(memory, theirs, fences),
            self.segment_sharing,
            peer,
            self.announce,
            self.refuse,
        )
        if self.native is not None:
            self.chunks.connect(self.native, memory)
        self._order = fences.order
        self._writer_waiting = theirs.writer_waiting
        self._taken = theirs.taken
        self._read_by_peer = ours.pieces
        self._ring = theirs.ring
        self._end = theirs.data_end
        self._kept: deque[tuple[bytes, memoryview | None]] = deque()
        self.references = ReferenceWriter(
            self._out, self._kept, self.segment_sharing, in_place, pair.peer.doorbell, attach=pair.is_read
        )
        self.reference_reader = ReferenceReader(
            self.segment_sharing, pair.peer_memory, in_place, memory.cast("Q"), theirs.pieces
        )
        # What the peer has read where it lies, when that was last looked at, and when it was first seen so.
        self._pieces, self._pieces_since = 0, 0.0
        self._next = 1
        # Index of the word in which the next stamp will be.
        self._at = self._ring >> 3
        self._started = False
        self._receiving = False
        self._ending = False
        self._failed = False
        self._closed = False
        # What has come could not be taken: nothing more is read.
        self._refusing = False

    @property
    def writable(self) -> bool:
        """Whether nothing waits to be handed over."""
        return not self._kept and not self.references.full

    @property
    def shared(self) -> ShmLink:
        """This link."""
        return self

    @property
    def closed(self) -> bool:
        """Whether the link has ended."""
        return self._closed

    def peer_process(self) -> PidFd | None:
        """Return the process at the other end."""
        return peer_process(self._stream.sock)

    def start(self) -> None:
        """Begin to read."""
        self._started = True
        self._stream.start_reading(self._hung_up)
        self._doorbell.add(self)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send one frame; True if there was space for it."""
        if self._closed or self._ending:
            return True
        try:
            put = not self._kept and self._out.put(header, payload)
        except OSError as error:
            put = False
            self._fail(error)
        if put:
            self._peer_doorbell.ring()
            return True
        self._kept.append((header, payload))
        self._out.request_wakeup()
        # Between the look and the word, space may have come; `drained` must not be called from here.
        self._runtime.call_soon(self.poll)
        return False

    def poll(self) -> bool:
        """Hand out what has arrived, for at most `BUDGET` seconds, and send what had to wait."""
        moved = self._flush() if self._kept else False
        if self.references.unread:
            moved = self._collect() or self.is_being_read() or moved
        if self._words[self._at] != self._next or not self._started or self._receiving:
            return moved
        self._receiving = True
        try:
            self._receive()
        except UnreadableError as error:
            self._lost(error)
        except Exception as error:
            self._refuse(error)
        finally:
            self._receiving = self._refusing
        return True

    def is_being_read(self) -> bool:
        """Whether the peer is in the midst of reading memory of this rank, and will soon be done."""
        pieces = 0 if self._closed else self._words[self._read_by_peer]
        if not pieces % 2:
            return False
        now = self._runtime.ticks()
        if pieces != self._pieces:
            self._pieces, self._pieces_since = pieces, now
        return now - self._pieces_since < PIECE_TIME

    def announce_to(self, links: Sequence[ShmLink]) -> None:
        """As `announce`, for several links."""
        ring_all([link._peer_doorbell for link in links])

    def is_beside(self) -> bool:
        """Whether the peer waits on the core of this rank."""
        return not self._closed and self._peer_doorbell.is_beside()

    def divert(self) -> None:
        """Nothing to do: payloads arrive whole."""

    def finish(self) -> None:
        """Send what is kept, then shut down the sending side of the stream."""
        self._ending = self.references.ended = True
        if not self._kept and not self._closed:
            self._shutdown()

    def fail(self, error: Exception) -> None:
        """Close the link and tell the sink why, as if reading had failed."""
        self._lost(error)

    def refuse(self, error: Exception) -> None:
        """Refuse what has come, but not while an operation is looking at it."""
        self._runtime.call_soon(self._refuse_once, error)

    def close(self) -> None:
        """Close the stream and leave the memory to the peer."""
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
        self._kept.clear()
        self._stream.close()
        # The memory goes with the last view of it.
        self._memory, self._words, self._at = _NOTHING, _SILENCE, 0
        self.references.close()
        del self._out

    def purge(self, group: int, has_left: bool) -> None:
        """Free what the peer has put for a group that is over, and what it will put if it has not left the group."""
        self.peer_outbox.purge(group)
        self.chunks.purge(group)
        if has_left:
            self.peer_outbox.release(group)
            self.chunks.release(group)

    def departed(self, group: int) -> None:
        """The peer has left a group: what was posted for it there is not read any more."""
        if not self._closed:
            self.common_writer.withdraw(self.lane_writer, group)

    def unmap(self) -> None:
        """After `close`: unmap the segments of the peer; slots can still be read."""
        self.segment_sharing.forget()

    def forget(self) -> None:
        """After `close`: let go of what can still be read, and so of the memory, whoever keeps this object."""
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
                raise ProtocolError(f"rank {self.peer} wrote a frame of kind {entry[1]} and length {length}")
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
        """Hand out a frame whose payload lies elsewhere; False if there is more to read in the next turn."""
        if header[0] != FrameKind.DATA or not 0 < header[7] <= MOST_BY_REFERENCE:
            raise ProtocolError(f"rank {self.peer} wrote a frame of kind {header[0]} and length {header[7]}")
        ticks = self._runtime.ticks
        entry = self._words[self._at : self._at + LINE // 8]
        taken = self.reference_reader.take(self, segment, entry, header, lambda: ticks() > deadline)
        if not taken and not self._closed:
            self._runtime.call_soon(self.poll)
        return taken

    def _collect(self) -> bool:
        """Say of what the peer has read that it is."""
        references = self.references
        was_full = references.full
        found = references.collect()
        if found and not self._closed:
            if not references.unread and not self._kept:
                self._out.cancel_wakeup()
            if was_full and self.writable:
                self.sink.drained(self)
        return found

    def _flush(self) -> bool:
        if self._failed:
            return False
        kept, put = self._kept, self._out.put
        moved = False
        try:
            while kept and put(*kept[0]):
                kept.popleft()
                moved = True
        except OSError as error:
            self._fail(error)
            return moved
        if moved:
            self._peer_doorbell.ring()
        if kept:
            return moved
        if not self.references.unread:
            self._out.cancel_wakeup()
        if self._ending:
            self._shutdown()
        self.sink.drained(self)
        return True

    def _fail(self, error: OSError) -> None:
        """There is no memory for a frame: end, but not while the sink is calling. No later frame may overtake it."""
        self._failed = True
        self._runtime.call_soon(self._lost, error)

    def _shutdown(self) -> None:
        try:
            self._stream.shutdown()
        except OSError:
            self._runtime.call_soon(self._lost, None)  # the peer is gone, too

    def _hung_up(self) -> None:
        """A message about segments has come, or the peer is gone; what it wrote before is in memory."""
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
        self._lost(error)

    def _lost(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            if not self._refusing:
                self.sink.lost(self, error)

    def _refuse_once(self, error: Exception) -> None:
        if not self._refusing:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Read nothing more, since what has come cannot be taken; at the second such error, close."""
        if self._refusing:
            self.close()
        elif not self._closed:
            self._refusing = self._receiving = True
            self.sink.lost(self, error)
