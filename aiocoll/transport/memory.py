"""Links in memory between ranks that are tasks of one event loop.

A `Hub` is the network between the ranks. The frames of a link arrive in order, in a later turn of the loop. With a
`latency` they take that many seconds of the runtime's clock, which may be virtual.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Card, Link, Sink
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.frame import HEADER, Header

__all__ = ["Hub", "MemoryLink", "MemoryTransport"]


class Hub:
    """A network in memory, with simulated latency and blocked connections between its ranks.

    Args:
        runtime: clock and loop of all ranks.
        latency: returns the seconds that a frame takes between two ranks, called per frame; None for the next turn of
            the loop.
    """

    def __init__(self, runtime: Runtime, latency: Callable[[int, int], float] | None = None) -> None:
        self.runtime = runtime
        self.latency = latency
        self.ranks: dict[int, MemoryTransport] = {}
        self.awaited: dict[int, list[asyncio.Future[None]]] = {}
        self.connected: set[tuple[int, int, ConnKind]] = set()
        self.links: dict[MemoryLink, None] = {}
        #: Pairs (source, target) of ranks between which frames are delayed now.
        self.blocked: set[tuple[int, int]] = set()
        self._opened: asyncio.Event = asyncio.Event()

    def cut(self, a: int, b: int) -> None:
        """Break all links between ranks `a` and `b`. Both ranks detect it at once."""
        for link in [link for link in self.links if link.ends == (min(a, b), max(a, b))]:
            link.break_off(ConnectionResetError(f"the link between rank {a} and rank {b} was cut"))

    def block(self, source: int, target: int) -> None:
        """Delay frames and new links from `source` to `target` until `unblock`. Requires a latency."""
        self.blocked.add((source, target))

    def unblock(self, source: int, target: int) -> None:
        """Deliver the frames that `block` has delayed, in order."""
        self.blocked.discard((source, target))
        self.deliver_unblocked()

    def is_blocked(self, source: int, target: int) -> bool:
        """Return whether frames from `source` to `target` are delayed by `block`."""
        return (source, target) in self.blocked

    def deliver_unblocked(self) -> None:
        """Deliver the delayed frames of ranks that are no longer blocked."""
        self._opened.set()
        for link in list(self.links):
            link.release()

    async def wait_until_unblocked(self, a: int, b: int) -> None:
        """Wait until ranks `a` and `b` can send frames in both directions."""
        while self.is_blocked(a, b) or self.is_blocked(b, a):
            self._opened.clear()
            await self._opened.wait()


class MemoryLink:
    """An end of a link in memory; see `aiocoll.transport.base.Link`."""

    sink: Sink
    other: MemoryLink
    shared = None
    carrier = "memory"

    def __init__(self, hub: Hub, rank: int, peer: int, kind: ConnKind) -> None:
        self.peer = peer
        self.kind = kind
        self.ends = (min(rank, peer), max(rank, peer))
        self._hub = hub
        self._rank = rank
        self._inbox: deque[tuple[Header, bytes]] = deque()
        self._started = False
        self._closed = False
        # Set when the sink has refused a frame. From then on, no frames are delivered.
        self._refusing = False
        self._due = 0.0
        self._held_count = 0
        self._in_transit: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        hub.links[self] = None

    @property
    def writable(self) -> bool:
        """Return True: frames are copied, so a link always accepts one."""
        return True

    def peer_process(self) -> None:
        """Return None, because both ends are in this process."""

    def start(self) -> None:
        """Start delivering frames."""
        self._started = True
        if self._inbox:
            self._hub.runtime.call_soon(self.poll)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Copy the frame into the inbox of the other end."""
        if not self._closed:
            self._after_latency(self.other._arrive, HEADER.unpack(header), b"" if payload is None else bytes(payload))
        return True

    def poll(self) -> bool:
        """Deliver all frames that have arrived; return whether there were any."""
        moved = False
        while self._inbox and self._started and not self._closed:
            header, payload = self._inbox.popleft()
            moved = True
            try:
                self.sink.deliver(self, header, memoryview(payload))
            except Exception as error:
                self._refusing = True
                self._inbox.clear()
                self.sink.lost(self, error)
        return moved

    def divert(self) -> None:
        """Do nothing, because every payload arrives in one piece."""

    def finish(self) -> None:
        """End the sending side after the frames written so far."""
        if not self._closed:
            self._after_latency(self.other._on_peer_ended)

    def close(self) -> None:
        """Close this end. The other end sees a broken link, unless `finish` was called before."""
        if not self._closed:
            self._detach()
            if not self._hub.runtime.loop.is_closed():
                self._after_latency(self.other.break_off, ConnectionResetError(f"rank {self._rank} closed the link"))

    def break_off(self, error: Exception | None) -> None:
        """Break the link at both ends, unless it is closed."""
        if not self._closed:
            self._detach()
            if not self._refusing:
                self._hub.runtime.call_soon(self.sink.lost, self, error)
            self.other.break_off(error)

    def _after_latency(self, call: Callable[..., None], *args: object) -> None:
        runtime, latency = self._hub.runtime, self._hub.latency
        if latency is None:
            runtime.call_soon(call, *args)
            return
        # Frames of a link must stay in order, even if latencies differ. Timers with equal deadlines fire in any order,
        # so each timer delivers the frame that was written first.
        now = runtime.time()
        self._due = max(self._due, now + latency(self._rank, self.peer))
        self._in_transit.append((call, args))
        runtime.call_later(self._due - now, self._on_due)

    def _on_due(self) -> None:
        if self._hub.is_blocked(self._rank, self.peer):
            self._held_count += 1
            return
        call, args = self._in_transit.popleft()
        call(*args)

    def release(self) -> None:
        """Deliver the delayed frames, unless the peer is still blocked."""
        held, self._held_count = self._held_count, 0
        for _ in range(held):
            self._hub.runtime.call_soon(self._on_due)

    def _arrive(self, header: Header, payload: bytes) -> None:
        if not self._closed and not self._refusing:
            self._inbox.append((header, payload))
            self.poll()

    def _on_peer_ended(self) -> None:
        if not self._closed:
            self._detach()
            if not self._refusing:
                self.sink.lost(self, None)
            self._after_latency(self.other._on_peer_ended)

    def _detach(self) -> None:
        self._closed = True
        del self._hub.links[self]
        self._hub.connected.discard((self._rank, self.peer, self.kind))


class MemoryTransport:
    """The transport of one rank over a `Hub`; see `aiocoll.transport.base.Transport`."""

    name = "memory"
    registered_memory = None
    accepted: Callable[[Link], None]
    heartbeat_accepted: Callable[[int, ByteStream], None]
    look: Callable[[], bool]
    keep_polling: Callable[[bool], bool]

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    async def listen(self) -> Card:
        """Join the hub, so that other ranks can connect."""
        self._hub.ranks[self._rank] = self
        for newcomer in self._hub.awaited.pop(self._rank, ()):
            if not newcomer.done():
                newcomer.set_result(None)
        return {}

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Make both ends of a link at once. Wait for a peer that has not joined the hub yet."""
        hub = self._hub
        await self.reachable(peer)
        if (self._rank, peer, kind) in hub.connected:
            return None
        hub.connected |= {(self._rank, peer, kind), (peer, self._rank, kind)}
        other = hub.ranks[peer]
        near = MemoryLink(self._hub, self._rank, peer, kind)
        far = MemoryLink(self._hub, peer, self._rank, kind)
        near.other, far.other = far, near
        other.accepted(far)
        return near

    async def connect_heartbeat(self, peer: int, card: Card) -> None:
        """Do nothing, because ranks of one process exchange no heartbeats."""

    async def reachable(self, peer: int) -> None:
        """Wait until a peer has joined the hub and frames reach it."""
        hub = self._hub
        while peer not in hub.ranks or hub.is_blocked(self._rank, peer) or hub.is_blocked(peer, self._rank):
            if peer not in hub.ranks:
                arrival = hub.runtime.loop.create_future()
                hub.awaited.setdefault(peer, []).append(arrival)
                await arrival
            await hub.wait_until_unblocked(self._rank, peer)

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Return "memory"."""
        return "memory", None

    def catch_up(self) -> None:
        """Do nothing, because all frames arrive in the order in which they were written, even across links."""

    async def aclose(self) -> None:
        """Leave the hub, so that peers can open no more links to this rank."""
        self.close()

    def close(self) -> None:
        """Leave the hub, so that peers can open no more links to this rank."""
        self._hub.ranks.pop(self._rank, None)
