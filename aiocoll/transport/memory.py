"""Ranks as tasks of one event loop: links that hand frames over in memory, and an arena.

A `Hub` is the network between them. Frames of a link arrive in order, in a later turn of the loop; with a `latency`
they take that many seconds of the runtime's clock, which may be virtual.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiocoll.errors import ProtocolError
from aiocoll.handshake import ConnKind
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Card, Link, Sink
from aiocoll.transport.frame import HEADER, Header

__all__ = ["Hub", "MemoryArena", "MemoryLink", "MemoryTransport"]

#: Blocks a rank may have published and not yet released: two per operation in flight for a handful of operations.
SLOTS = 8
#: Largest block of the arena; larger operations go through it in pieces.
SLOT_NBYTES = 256 * 1024


class Hub:
    """The network in memory: who is there, how long frames take, which links are cut.

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
        self.arenas: dict[int, MemoryArena] = {}
        self.links: list[MemoryLink] = []

    def cut(self, a: int, b: int) -> None:
        """Break every link between ranks `a` and `b`, as when a cable is pulled and noticed at once."""
        for link in [link for link in self.links if link.ends == (min(a, b), max(a, b))]:
            link.break_off(ConnectionResetError(f"the link between rank {a} and rank {b} was cut"))

    def arena(self, group: int, world_size: int) -> MemoryArena:
        """Return the arena that the members of `group` share."""
        return self.arenas.setdefault(group, MemoryArena(self.runtime, world_size))


class MemoryLink:
    """One end of a link in memory; see `aiocoll.transport.base.Link`."""

    sink: Sink
    other: MemoryLink

    def __init__(self, hub: Hub, rank: int, peer: int, kind: ConnKind) -> None:
        self.peer = peer
        self.kind = kind
        self.ends = (min(rank, peer), max(rank, peer))
        self._hub = hub
        self._rank = rank
        self._inbox: deque[tuple[Header, bytes]] = deque()
        self._started = False
        self._closed = False
        self._due = 0.0
        self._flying: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        hub.links.append(self)

    @property
    def writable(self) -> bool:
        """Always: frames are copied."""
        return True

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
            except ProtocolError as error:
                self.break_off(error)
        return moved

    def divert(self) -> None:
        """Nothing to do: payloads arrive whole."""

    def finish(self) -> None:
        """End our side after what was written."""
        if not self._closed:
            self._after_latency(self.other._ended)

    def close(self) -> None:
        """End the link on this side; the other end sees it broken unless it had ended too."""
        if not self._closed:
            self._detach()
            self._after_latency(self.other.break_off, ConnectionResetError(f"rank {self._rank} closed the link"))

    def break_off(self, error: Exception | None) -> None:
        """Lose the link on both sides, unless it is closed."""
        if not self._closed:
            self._detach()
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
        call, args = self._flying.popleft()
        call(*args)

    def _arrive(self, header: Header, payload: bytes) -> None:
        if not self._closed:
            self._inbox.append((header, payload))
            self.poll()

    def _ended(self) -> None:
        if not self._closed:
            self._detach()
            self.sink.lost(self, None)
            self._after_latency(self.other._ended)

    def _detach(self) -> None:
        self._closed = True
        self._hub.links.remove(self)
        self._hub.connected.discard((self._rank, self.peer, self.kind))


class MemoryTransport:
    """One rank's way into a `Hub`; see `aiocoll.transport.base.Transport`."""

    name = "memory"
    accepted: Callable[[Link], None]
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
        if peer not in hub.ranks:
            came = hub.runtime.loop.create_future()
            hub.awaited.setdefault(peer, []).append(came)
            await came
        if (self._rank, peer, kind) in hub.connected:
            return None
        hub.connected |= {(self._rank, peer, kind), (peer, self._rank, kind)}
        other = hub.ranks[peer]
        near = MemoryLink(self._hub, self._rank, peer, kind)
        far = MemoryLink(self._hub, peer, self._rank, kind)
        near.other, far.other = far, near
        other.accepted(far)
        return near

    def catch_up(self) -> None:
        """Nothing to do: what is written first arrives first, also on different links."""

    async def aclose(self) -> None:
        """Leave the hub."""
        self._hub.ranks.pop(self._rank, None)


class MemoryArena:
    """Blocks that every rank of a group can look at; see `aiocoll.transport.base.Arena`."""

    slot_nbytes = SLOT_NBYTES

    def __init__(self, runtime: Runtime, world_size: int) -> None:
        self._runtime = runtime
        self._world_size = world_size
        self._blocks: dict[tuple[int, int, int], tuple[int, memoryview, set[int]]] = {}
        # Blocks of each rank, and of each of its operations, that not all others have released.
        self._used = [0] * world_size
        self._held: dict[tuple[int, int], int] = {}
        self._wakes: dict[int, Callable[[], None]] = {}
        self._waking = False

    def publish(self, rank: int, op: int, stage: int, fingerprint: int, block: memoryview) -> bool:
        """Keep a copy of `block` until every other rank has released it.

        An operation that has no block there is never refused: ranks that publish several operations in different
        orders would wait for each other's slots.
        """
        held = self._held.get((rank, op), 0)
        if held and self._used[rank] >= SLOTS:
            return False
        readers = set(range(self._world_size)) - {rank}
        if readers:
            self._used[rank] += 1
            self._held[rank, op] = held + 1
            self._blocks[rank, op, stage] = fingerprint, memoryview(bytes(block)), readers
            self._wake()
        return True

    def look(self, rank: int, op: int, stage: int) -> tuple[int, memoryview] | None:
        """Return what `rank` published."""
        block = self._blocks.get((rank, op, stage))
        return None if block is None else block[:2]

    def release(self, rank: int, reader: int, op: int, stage: int) -> None:
        """Free the block after its last reader."""
        readers = self._blocks[rank, op, stage][2]
        readers.discard(reader)
        if not readers:
            del self._blocks[rank, op, stage]
            self._used[rank] -= 1
            self._held[rank, op] -= 1
            if not self._held[rank, op]:
                del self._held[rank, op]
            self._wake()

    def watch(self, rank: int, wake: Callable[[], None]) -> None:
        """Call `wake` after each change, in a turn of the loop of its own."""
        self._wakes[rank] = wake

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            self._runtime.call_soon(self._woken)

    def _woken(self) -> None:
        self._waking = False
        for wake in list(self._wakes.values()):
            wake()
