"""The interface between the engine and a transport.

A transport opens **links**. A link is an ordered, reliable, framed connection to one peer. Every implementation passes
the contract suite in `tests/transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiocoll.process import PidFd
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.frame import Header
from aiocoll.transport.shared_memory import PeerOutbox

if TYPE_CHECKING:
    from aiocoll.native import core
    from aiocoll.transport.shm.chunk_queue import Chunks
    from aiocoll.transport.shm.references import ReferenceWriter
    from aiocoll.transport.shm.registered_memory import RegisteredMemory
    from aiocoll.transport.shm.slots import CommonWriter, LaneWriter
    from aiocoll.transport.shm.slots import SlotReader as SlotReader

__all__ = ["Card", "Link", "SharedMemoryLink", "Sink", "Transport"]

#: The data that a rank publishes so that peers can connect to it: plain strings and numbers.
Card = dict[str, Any]


class Sink(Protocol):
    """The receiver of a link's frames and events: the engine.

    An exception from `route` or `deliver` ends the link. The other methods must not raise.
    """

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Return the memory for the payload of `header`, exactly `length` bytes; None to use temporary memory.

        The link calls it only for payloads that have not fully arrived yet.
        """

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle a complete frame.

        Args:
            link: the link on which it arrived.
            header: its header.
            payload: its payload, valid only during the call; None if it is in the memory that `route` returned.
        """

    def withdrawn(self, link: Link, header: Header) -> None:
        """Handle a frame whose writer has withdrawn the payload, or the rest of it, before this rank read it."""

    def drained(self, link: Link) -> None:
        """Handle an empty send queue of the link. Called only after `writable` was False."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """Handle a lost link. Called once, never after `close`.

        Args:
            link: the link.
            error: None after the peer has closed the link in order. An `OSError` if the connection broke. Any other
                error means that the received data is invalid. The link then reads no more, the sink may `write` the
                reason to the peer, and must call `finish` or `close`.
        """


class Link(Protocol):
    """A framed, ordered, reliable connection to one peer."""

    peer: int
    """Rank of the other end in the job."""
    kind: ConnKind
    sink: Sink
    """May be replaced before the first frame is read."""

    @property
    def carrier(self) -> str:
        """The medium of the link: "memory", "unix", "tcp" or "shm"."""

    @property
    def writable(self) -> bool:
        """Return whether the send queue is empty."""

    @property
    def shared(self) -> SharedMemoryLink | None:
        """The link itself if it uses memory that both ends map, else None."""

    def peer_process(self) -> PidFd | None:
        """Return the process at the other end, or None if it is not known. The caller closes it."""

    def start(self) -> None:
        """Start to read. The caller has set `sink` before."""

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send one frame.

        Returns:
            Whether the frame was sent as a whole. The caller may then overwrite `payload` at once.
        """

    def poll(self) -> bool:
        """Read and write without waiting, within the time limit of one callback.

        Returns:
            Whether any data moved.
        """

    def divert(self) -> None:
        """Discard the rest of the payload that is arriving, because the memory from `route` is no longer available."""

    def finish(self) -> None:
        """Send the queued frames, then end this side; `Sink.lost` follows when the peer has ended its side."""

    def close(self) -> None:
        """Close the link now and discard queued frames. Idempotent."""


class SharedMemoryLink(Link, Protocol):
    """A link through memory that both ends map. Operations also use its lanes and chunk queues directly."""

    @property
    def native(self) -> core.PeerLanes | None:
        """The accelerator's view of the lanes; None without the accelerator."""

    @property
    def common_writer(self) -> CommonWriter:
        """The writer of this rank's common lane, which all peers read; the same for all links."""

    @property
    def lane_writer(self) -> LaneWriter:
        """The writer of this rank's lane for the peer."""

    @property
    def common_reader(self) -> SlotReader:
        """The reader of the peer's common lane."""

    @property
    def lane_reader(self) -> SlotReader:
        """The reader of the peer's lane for this rank."""

    @property
    def peer_outbox(self) -> PeerOutbox:
        """The outbox of the peer."""

    @property
    def chunks(self) -> Chunks:
        """The chunk queues, one in each direction."""

    @property
    def references(self) -> ReferenceWriter:
        """The writer of frames by reference, whose payload the peer reads in place."""

    def announce(self) -> None:
        """Wake the peer, if it sleeps, after a slot or a chunk queue has changed. Only for an open link."""

    def announce_to(self, links: Sequence[Any]) -> None:
        """Wake the peers of several links, as `announce` does for one. This link may be one of them."""

    def shares_core(self) -> bool:
        """Return whether this rank now runs on the core on which the peer ran when it last waited for long."""

    def refuse(self, error: Exception) -> None:
        """End the link in the next loop iteration, because the peer has written invalid data to shared memory."""

    def purge(self, group: int, has_left: bool) -> None:
        """Free the slots and chunks of the peer that belong to a group that has ended.

        Args:
            group: id of the group.
            has_left: the peer has left the group and posts nothing more. If False, contributions that it posts later
                are freed when they arrive.
        """

    def on_departure(self, group: int) -> None:
        """Handle a peer that has left a group: it no longer reads contributions posted there."""

    def unmap(self) -> None:
        """Unmap the segments of the peer, after `close`. Slots can still be read."""

    def forget(self) -> None:
        """Release the memory of slots, after `close`, even if references to this object remain."""


class Transport(Protocol):
    """The transport of one rank: accepts links of peers and opens links to them."""

    name: str
    accepted: Callable[[Link], None]
    """Called with each link that a peer has opened; set before `listen`."""
    heartbeat_accepted: Callable[[int, ByteStream], None]
    """Called with the rank of a peer that has opened a connection for heartbeats, and that connection; set before
    `listen`."""
    look: Callable[[], bool]
    """Called by a transport with shared memory whenever it polls its links. Reads slots and chunk queues, and returns
    whether any data moved."""
    keep_polling: Callable[[bool], bool]
    """Called at the end of a loop iteration by a transport that can sleep until a peer wakes this rank. The argument is
    whether any data moved. Returns whether to poll again in the next iteration instead of sleeping."""

    @property
    def registered_memory(self) -> RegisteredMemory | None:
        """Memory of this rank that peers read in place; None if no memory is shared."""

    async def listen(self) -> Card:
        """Start to accept links; return this rank's card."""

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Open a link to `peer`; return None if the peer is opening a link at the same time, which will be accepted."""

    async def connect_heartbeat(self, peer: int, card: Card) -> ByteStream | None:
        """Open a connection to another process for heartbeats; return None as `connect` does."""

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Return the medium of the data link to `peer` ("none" before the first), and why it is not shared memory."""

    def catch_up(self) -> None:
        """Deliver frames that peers wrote before another notice that has just arrived on a different path.

        Do nothing if frames and notices arrive in order anyway.
        """

    async def aclose(self) -> None:
        """Stop accepting links. Open links stay open."""

    def close(self) -> None:
        """Stop accepting links, as `aclose`, but without waiting for tasks in progress. The loop may be closed."""
