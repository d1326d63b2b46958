"""The interface between the engine and a transport.

A transport offers **links**: ordered, reliable, framed connections to one peer each. Every implementation passes the
contract suite in `tests/transport`.
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

#: What a rank publishes so that others can reach it: plain strings and numbers.
Card = dict[str, Any]


class Sink(Protocol):
    """The engine's side of a link. What `route` and `deliver` raise ends the link; the others must not raise."""

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Say where the payload of `header` shall be placed: exactly `length` bytes, or None for a temporary place.

        Asked only for payloads that have not arrived whole.
        """

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Take a complete frame; `payload` is valid during the call only, and None if it was placed by `route`."""

    def withdrawn(self, link: Link, header: Header) -> None:
        """The writer of a frame has taken its payload back, or the rest of it, before that was read."""

    def drained(self, link: Link) -> None:
        """All that `write` had to keep has been handed over; called only after `writable` was False."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """The link is gone: None after the peer closed it in order. Called once, never after `close`.

        If `error` is no `OSError`, what has come on the link cannot be taken: nothing more of it is read, and the sink
        may `write` why to the peer, and has to `finish` or to `close` it.
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
        """What carries the bytes: "memory", "unix", "tcp" or "shm"."""

    @property
    def writable(self) -> bool:
        """Whether nothing waits to be handed over."""

    @property
    def shared(self) -> SharedMemoryLink | None:
        """The link itself if it goes through memory that both ends map, else None."""

    def peer_process(self) -> PidFd | None:
        """Return the process at the other end, for the caller to close; None if it is not known."""

    def start(self) -> None:
        """Begin to read; `sink` is set by now."""

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Send one frame; True if it was handed over whole, so that `payload` may be overwritten at once."""

    def poll(self) -> bool:
        """Move what can be moved now, within the time one callback may take; True if anything moved."""

    def divert(self) -> None:
        """Drop the rest of the payload that is arriving: the memory `route` named is in other use."""

    def finish(self) -> None:
        """Hand over what is queued, then end our side; `lost(None)` follows when the peer has ended its side too."""

    def close(self) -> None:
        """End the link now; what was not handed over is lost. Idempotent."""


class SharedMemoryLink(Link, Protocol):
    """A link through memory that both ends map; operations use its parts besides its frames."""

    @property
    def native(self) -> core.PeerLanes | None:
        """The accelerator's view of its lanes; None without it."""

    @property
    def common_writer(self) -> CommonWriter:
        """Where this rank posts what several peers read; the same for all links."""

    @property
    def lane_writer(self) -> LaneWriter:
        """Where this rank posts what only the peer reads."""

    @property
    def common_reader(self) -> SlotReader:
        """Where the peer posts what several ranks read."""

    @property
    def lane_reader(self) -> SlotReader:
        """Where the peer posts what only this rank reads."""

    @property
    def peer_outbox(self) -> PeerOutbox:
        """All that the peer posts."""

    @property
    def chunks(self) -> Chunks:
        """The chunk queues, one in each direction."""

    @property
    def references(self) -> ReferenceWriter:
        """Frames whose payload the peer reads where it lies."""

    def announce(self) -> None:
        """Wake the peer, if it sleeps, after a slot or a chunk queue has changed; only while the link is open."""

    def announce_to(self, links: Sequence[Any]) -> None:
        """As `announce`, for several links, of which this may be one."""

    def is_beside(self) -> bool:
        """Whether the peer, when it last waited for long, was on the core on which this rank is now."""

    def refuse(self, error: Exception) -> None:
        """End the link in the next turn, since what the peer has put there cannot be taken."""

    def purge(self, group: int, has_left: bool) -> None:
        """Free what the peer has put, for a group that is over, into slots and the chunk queue.

        Args:
            group: id of the group.
            has_left: the peer puts nothing more; else that is freed, too, when it comes.
        """

    def departed(self, group: int) -> None:
        """The peer has left a group: it reads nothing more that was posted there."""

    def unmap(self) -> None:
        """After `close`: unmap the segments of the peer; slots can still be read."""

    def forget(self) -> None:
        """After `close`: let go of all that can still be read, and so of the memory, whoever keeps this object."""


class Transport(Protocol):
    """How one rank reaches its peers."""

    name: str
    accepted: Callable[[Link], None]
    """Called with each link a peer has opened; set before `listen`."""
    heartbeat_accepted: Callable[[int, ByteStream], None]
    """Called with each peer that has opened a connection for heartbeats, and the connection; set before `listen`."""
    look: Callable[[], bool]
    """Called by a transport with shared memory whenever it polls its links: looks at slots and chunk queues.
    Whether anything moved."""
    linger: Callable[[bool], bool]
    """Called at the end of a turn by a transport whose peers have to wake this rank: takes whether anything has moved;
    returns whether to poll again in the next turn before this rank has to be woken."""

    @property
    def registered_memory(self) -> RegisteredMemory | None:
        """Memory of this rank that peers read in place; None where no memory is shared."""

    async def listen(self) -> Card:
        """Start to accept links; return this rank's card."""

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Open a link to `peer`; None if that peer is opening one to us at the same moment (it will be accepted)."""

    async def connect_heartbeat(self, peer: int, card: Card) -> ByteStream | None:
        """Open a connection to another process for heartbeats; None as for `connect`."""

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Return what carries data to `peer` ("none" before the first), and why it is not shared memory."""

    def catch_up(self) -> None:
        """Deliver what peers wrote to their links before what has just arrived in another way.

        Does nothing where everything arrives in one order anyway.
        """

    async def aclose(self) -> None:
        """Stop accepting; links that are open stay open."""

    def close(self) -> None:
        """As `aclose`, without waiting for what is in progress: the loop may be closed."""
