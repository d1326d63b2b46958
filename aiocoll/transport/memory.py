"""Ranks as tasks of one event loop: links that hand frames over in memory.

A `Hub` is the network between them. Frames of a link arrive in order, in a later turn of the loop; with a `latency`
they take that many seconds of the runtime's clock, which may be virtual.
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
    """The network in memory: its ranks, the latency of frames, and links that are cut.

    Args:
        runtime: clock and loop of all ranks.
        latency: seconds a frame from one rank to another takes, asked per frame; None for the next turn of the loop.
    """

    def __init__(self, runtime: Runtime, latency: Callable[[int, int], float] | None = None) -> None:
        self.runtime = runtime
        self.latency = latency
        self.ranks: dict[int, MemoryTransport] = {}
        self.awaited: dict[int, list[asyncio.Future[None]]] = {}
        self.connected: set[tuple[int, int, ConnKind]] = set()
        self.links: dict[MemoryLink, None] = {}
        #: Sources and targets between which nothing gets through now.
        self.blocked: set[tuple[int, int]] = set()
        self._opened: asyncio.Event = asyncio.Event()

    def cut(self, a: int, b: int) -> None:
        """Break every link between ranks `a` and `b`, as when a cable is pulled and noticed at once."""
        for link in [link for link in self.links if link.ends == (min(a, b), max(a, b))]:
            link.break_off(ConnectionResetError(f"the link between rank {a} and rank {b} was cut"))

    def block(self, source: int, target: int) -> None:
        """Hold back what `source` sends to `target`; a link that is to be opened waits. Needs a latency."""
        self.blocked.add((source, target))

    def unblock(self, source: int, target: int) -> None:
        """Let through what was held back, in order."""
        self.blocked.discard((source, target))
        self.look_again()

    def is_blocked(self, source: int, target: int) -> bool:
        """Whether nothing gets through from one rank to another now."""
        return (source, target) in self.blocked

    def look_again(self) -> None:
        """Deliver what can be delivered now."""
        self._opened.set()
        for link in list(self.links):
            link.release()

    async def way(self, a: int, b: int) -> None:
        """Wait until frames get through between ranks `a` and `b`, in both directions."""
        while self.is_blocked(a, b) or self.is_blocked(b, a):
            self._opened.clear()
            await self._opened.wait()


class MemoryLink:
    """One end of a link in memory; see `aiocoll.transport.base.Link`."""

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
        # What has come could not be taken: nothing more is.
        self._refusing = False
        self._due = 0.0
        self._held = 0
        self._flying: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        hub.links[self] = None

    @property
    def writable(self) -> bool:
        """Always: frames are copied."""
        return True

    def peer_process(self) -> None:
        """Both ends are in one process."""

    def start(self) -> None:
        """Begin to hand out frames."""
        self._started = True
        if self._inbox:
            self._hub.runtime.call_soon(self.poll)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Copy the frame into the other end's inbox."""
        if not self._closed:
            self._after_latency(self.other._arrive, HEADER.unpack(header), b"" if payload is None else bytes(payload))
        return True

    def poll(self) -> bool:
        """Hand out what has arrived."""
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
        """Nothing to do: payloads arrive whole."""

    def finish(self) -> None:
        """End this side after what was written."""
        if not self._closed:
            self._after_latency(self.other._ended)

    def close(self) -> None:
        """End the link on this side; the other end sees it broken unless it had ended too."""
        if not self._closed:
            self._detach()
            if not self._hub.runtime.loop.is_closed():
                self._after_latency(self.other.break_off, ConnectionResetError(f"rank {self._rank} closed the link"))

    def break_off(self, error: Exception | None) -> None:
        """Lose the link on both sides, unless it is closed."""
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
        # Links are first in, first out whatever each frame's own latency; timers of the same time are in no order.
        now = runtime.time()
        self._due = max(self._due, now + latency(self._rank, self.peer))
        self._flying.append((call, args))
        runtime.call_later(self._due - now, self._land)

    def _land(self) -> None:
        if self._hub.is_blocked(self._rank, self.peer):
            self._held += 1
            return
        call, args = self._flying.popleft()
        call(*args)

    def release(self) -> None:
        """Deliver what was held back, unless the peer is still blocked."""
        held, self._held = self._held, 0
        for _ in range(held):
            self._hub.runtime.call_soon(self._land)

    def _arrive(self, header: Header, payload: bytes) -> None:
        if not self._closed and not self._refusing:
            self._inbox.append((header, payload))
            self.poll()

    def _ended(self) -> None:
        if not self._closed:
            self._detach()
            if not self._refusing:
                self.sink.lost(self, None)
            self._after_latency(self.other._ended)

    def _detach(self) -> None:
        self._closed = True
        del self._hub.links[self]
        self._hub.connected.discard((self._rank, self.peer, self.kind))


class MemoryTransport:
    """One rank's access to a `Hub`; see `aiocoll.transport.base.Transport`."""

    name = "memory"
    registered_memory = None
    accepted: Callable[[Link], None]
    heartbeat_accepted: Callable[[int, ByteStream], None]
    look: Callable[[], bool]
    linger: Callable[[bool], bool]

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    async def listen(self) -> Card:
        """Join the hub."""
        self._hub.ranks[self._rank] = self
        for newcomer in self._hub.awaited.pop(self._rank, ()):
            if not newcomer.done():
                newcomer.set_result(None)
        return {}

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Make both ends of a link at once, so that two ranks never cross; wait for a peer that has not come yet."""
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
        """All ranks are in one process: there are no heartbeats."""

    async def reachable(self, peer: int) -> None:
        """Wait until a peer has come, and frames get through to it."""
        hub = self._hub
        while peer not in hub.ranks or hub.is_blocked(self._rank, peer) or hub.is_blocked(peer, self._rank):
            if peer not in hub.ranks:
                came = hub.runtime.loop.create_future()
                hub.awaited.setdefault(peer, []).append(came)
                await came
            await hub.way(self._rank, peer)

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Return "memory"."""
        return "memory", None

    def catch_up(self) -> None:
        """Nothing to do: what is written first arrives first, also on different links."""

    async def aclose(self) -> None:
        """Leave the hub."""
        self.close()

    def close(self) -> None:
        """Leave the hub."""
        self._hub.ranks.pop(self._rank, None)
