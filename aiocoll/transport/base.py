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

#: The card that a rank publishes so that peers can connect to it: a dict of plain strings and numbers.
Card = dict[str, Any]


class Sink(Protocol):
    """The receiver of a link's frames and events, implemented by the engine.

    An exception from `route` or `deliver` ends the link. The other methods must not raise.
    """

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Return memory for a frame's payload of exactly `length` bytes, or None to receive it in temporary memory.

        The link calls it only for payloads that have not fully arrived yet.
        """

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle a frame that has arrived completely.

        Args:
            link: the link on which it arrived.
            header: its header.
            payload: its payload, valid only during the call; None if it is in the memory that `route` returned.
        """

    def withdrawn(self, link: Link, header: Header) -> None:
        """Handle a frame whose sender has withdrawn the payload before this rank had read all of it."""

    def drained(self, link: Link) -> None:
        """Handle a link whose send queue has become empty. Called only after `writable` was False."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """Handle a link that has closed or failed. Called once, and never after `close`.

        Args:
            link: the link.
            error: None after the peer has closed the link in order. An `OSError` if the connection broke. Any other
                error means that the received data is invalid. The link then reads no more, the sink may `write` the
                reason to the peer, and must call `finish` or `close`.
        """


class Link(Protocol):
    """A framed, ordered, reliable connection to one peer."""

    peer: int
    """The rank at the other end of the link, numbered as in the job."""
    kind: ConnKind
    sink: Sink
    """The receiver of frames and events. May be replaced before the first frame is read."""

    @property
    def carrier(self) -> str:
        """The medium of the link: "memory", "unix", "tcp" or "shm"."""

    @property
    def writable(self) -> bool:
        """Return whether the send queue is empty."""

    @property
    def shared(self) -> SharedMemoryLink | None:
        """The link itself if it uses memory that both ends map, otherwise None."""

    def peer_process(self) -> PidFd | None:
        """Return a handle of the process at the other end, which the caller closes; None if it is not known."""

    def start(self) -> None:
        """Start to read. The caller must have set `sink`."""

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send a frame, or queue it.

        Returns:
            Whether the frame was sent as a whole. The caller may then overwrite `payload` at once.
        """

    def poll(self) -> bool:
        """Read and write without waiting, within the time limit of one callback.

        Returns:
            Whether any data moved.
        """

    def divert(self) -> None:
        """Discard the rest of the arriving payload, because the memory from `route` must not be used any more."""

    def finish(self) -> None:
        """Send the queued frames, then end the sending side. `Sink.lost` follows when the peer has ended its side."""

    def close(self) -> None:
        """Close the link now and discard queued frames. Idempotent."""


class SharedMemoryLink(Link, Protocol):
    """A link through memory that both ends map. Operations use its lanes and chunk queues directly."""

    @property
    def native(self) -> core.PeerLanes | None:
        """The accelerator's view of the link's lanes; None without the accelerator."""

    @property
    def common_writer(self) -> CommonWriter:
        """The writer of this rank's common lane, which all peers read. All links share this writer."""

    @property
    def lane_writer(self) -> LaneWriter:
        """The writer of this rank's lane that only the peer reads."""

    @property
    def common_reader(self) -> SlotReader:
        """The reader of the peer's common lane, which other ranks read, too."""

    @property
    def lane_reader(self) -> SlotReader:
        """The reader of the peer's lane that only this rank reads."""

    @property
    def peer_outbox(self) -> PeerOutbox:
        """The peer's outbox: the memory in which the peer posts data."""

    @property
    def chunks(self) -> Chunks:
        """The two chunk queues of the link, one per direction."""

    @property
    def references(self) -> ReferenceWriter:
        """The writer of frames by reference, whose payload the peer reads in place."""

    def announce(self) -> None:
        """Wake the peer if it sleeps, because this rank has changed a slot or a chunk queue. Only for an open link."""

    def announce_to(self, links: Sequence[Any]) -> None:
        """Wake the peers of several links, which may include this link, as `announce` does."""

    def shares_core(self) -> bool:
        """Return whether this rank runs on the CPU core on which the peer last waited for long."""

    def refuse(self, error: Exception) -> None:
        """End the link in the next loop iteration, because the peer has written invalid data to the shared memory."""

    def purge(self, group: int, has_left: bool) -> None:
        """Free the peer's slots and chunks for a group that has ended.

        Args:
            group: id of the group.
            has_left: the peer has left the group and posts nothing more. If False, contributions that it posts later
                are freed when they arrive.
        """

    def on_departure(self, group: int) -> None:
        """Record that the peer has left a group, so it reads no more contributions of this rank to that group."""

    def unmap(self) -> None:
        """Unmap the peer's segments, after `close`. The peer's slots can still be read."""

    def forget(self) -> None:
        """Release the memory of the slots, after `close`, even if other objects still refer to this link."""


class Transport(Protocol):
    """The transport of one rank: it accepts the links that peers open, and opens links to peers."""

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
        """The memory of this rank that peers read in place; None if no memory is shared."""

    async def listen(self) -> Card:
        """Start to accept links; return this rank's card."""

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Open a link to `peer`; return None if `peer` is opening a link, which this rank will accept."""

    async def connect_heartbeat(self, peer: int, card: Card) -> ByteStream | None:
        """Open a heartbeat connection to another process; return None if `peer` is opening one."""

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Return the medium of the data link to `peer` ("none" if not open), and the reason why it is not "shm"."""

    def catch_up(self) -> None:
        """Deliver the frames that peers wrote before a notice, when the notice has arrived first on a faster path.

        Do nothing if frames and notices arrive in order anyway.
        """

    async def aclose(self) -> None:
        """Stop accepting links. Open links stay open."""

    def close(self) -> None:
        """Stop accepting links without waiting for running tasks. The event loop may be closed already."""
