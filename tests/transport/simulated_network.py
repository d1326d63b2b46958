"""A simulated network: handshakes over real sockets, a virtual clock, delayed messages, blocked event loops.

Each rank has a `StreamTransport` and its own event loop. A `Network` runs the loops in turn, one callback at a time.
It advances the clock when no loop has work. A connection is two pairs of unix sockets. The network relays every
message between them with a random delay. The seed determines the whole run.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    CONFIRM_SIZE,
    HANDSHAKE_TIMEOUT,
    HELLO_SIZE,
    PROOF_SIZE,
    VERDICT_SIZE,
    ConnKind,
)
from aiocoll.testing.virtual import VirtualLoop
from aiocoll.transport.base import Header, Link
from aiocoll.transport.byte_stream import resolve
from aiocoll.transport.frame import HEADER, FrameKind
from aiocoll.transport.shm.dial import _MESSAGE
from aiocoll.transport.stream import addresses
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["Network", "SimulatedRank"]

#: The longest delay of a message and the longest time for which an event loop is blocked, in virtual seconds.
LONGEST = 3 * HANDSHAKE_TIMEOUT
#: Sizes of the handshake messages in each direction. Later messages negotiate shared memory.
FROM_DIALLER = (HELLO_SIZE, PROOF_SIZE, CONFIRM_SIZE)
FROM_ACCEPTOR = (CHALLENGE_SIZE, VERDICT_SIZE)
#: The number of dials to a rank whose messages are often delayed. Later dials are rarely delayed, so that runs end.
SLOW_DIALS = 3
#: Virtual seconds after which an unfinished simulation has failed.
LIMIT = 10_000.0
#: The size of the send buffers of connections that are not established yet; a full buffer makes a socket unwritable.
BUFFER = 4096


class RankLoop(VirtualLoop):
    """The event loop of one rank, which runs one callback whenever `Network` calls `step`.

    Args:
        network: The owner of the clock.
        seed: The seed of the rank's random numbers.
        timers_first: Whether timers run before ready sockets, as in uvloop. asyncio runs the sockets first.
    """

    def __init__(self, network: Network, seed: int, timers_first: bool) -> None:
        self.network = network
        self.blocked_until = 0.0
        self._timers_first = timers_first
        self._batch = 0
        super().__init__(seed)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.network.now

    def jump(self, seconds: float | None) -> None:
        """Do nothing, since `Network` advances the clock."""

    @property
    def next_timer(self) -> float:
        """Return the time at which the next timer is due."""
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        return scheduled[0]._when if scheduled else float("inf")

    def has_work(self) -> bool:
        """Return whether a callback can run now."""
        ready = self._ready or self.next_timer <= self.network.now  # type: ignore[attr-defined]
        return bool(ready or self._selector.select(0))  # type: ignore[attr-defined]

    def step(self) -> None:
        """Run one callback. Callbacks that become ready meanwhile wait for the next iteration, as in any event loop."""
        ready = self._ready  # type: ignore[attr-defined]
        if not self._batch:
            for take in (self._take_timers, self._take_events)[:: 1 if self._timers_first else -1]:
                take()
            self._batch = len(ready)
        if self._batch:
            self._batch -= 1
            handle = ready.popleft()
            if not handle._cancelled:
                asyncio._set_running_loop(self)
                try:
                    handle._run()
                finally:
                    asyncio._set_running_loop(None)

    def _take_timers(self) -> None:
        while self.next_timer <= self.network.now:
            timer = heapq.heappop(self._scheduled)  # type: ignore[attr-defined]
            timer._scheduled = False
            self._ready.append(timer)  # type: ignore[attr-defined]

    def _take_events(self) -> None:
        self._process_events(self._selector.select(0))  # type: ignore[attr-defined]


class SimulatedRank:
    """A simulated rank with its transport, which receives the frames of its own links.

    Attributes:
        broken: The errors of broken links.
        received: The numbers in the received frames.
    """

    def __init__(self, network: Network, rank: int, seed: int, transport: str, timers_first: bool) -> None:
        self.rank = rank
        self.loop = RankLoop(network, seed, timers_first)
        self.loop.set_exception_handler(lambda _, context: network.errors.append(context))
        self.transport = StreamTransport(
            Runtime.of(self.loop),
            rank,
            2,
            "job",
            b"k" * 32,
            StreamOptions(transport=transport, connect_timeout=float("inf")),
        )
        self.transport.accepted = self.take
        self.links: list[Link] = []
        self.broken: list[Exception | None] = []
        self.received: list[int] = []
        self.changed = asyncio.Event()

    def take(self, link: Link) -> None:
        link.sink = self
        self.links.append(link)
        link.start()
        self.changed.set()

    async def open(self, peer: SimulatedRank, kind: ConnKind, *, dials: bool) -> None:
        """Open a link to `peer`, or wait until `peer` opens one; then exchange one message in each direction."""
        if dials:
            card = {**peer.transport.card, "unix": f"@{peer.rank}"}
            link = await self.transport.connect(peer.rank, card, kind)
            if link is not None:
                self.take(link)
        await self.until(lambda: self.links)
        self.links[-1].write(HEADER.pack(FrameKind.DATA, 0, 0, 0, self.rank, 0, 0, 0, 0))
        await self.until(lambda: self.received)

    async def close(self) -> None:
        await self.transport.aclose()
        for link in self.links:
            link.close()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def route(self, link: Link, header: Header) -> memoryview | None:
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        self.received.append(header[4])
        self.changed.set()

    def withdrawn(self, link: Link, header: Header) -> None:
        pass

    def drained(self, link: Link) -> None:
        pass

    def lost(self, link: Link, error: Exception | None) -> None:
        self.broken.append(error)


class Relay:
    """A relay for one direction of a connection: receives messages from one socket, and sends them to another later.

    Args:
        network: The owner of the clock and the random numbers.
        source: The socket to receive from.
        target: The socket to send to.
        sizes: The sizes of the first messages.
        delayed: The share of delayed messages.
    """

    def __init__(
        self,
        network: Network,
        source: socket.socket,
        target: socket.socket,
        sizes: tuple[int, ...],
        delayed: float,
    ) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._sizes = list(sizes)
        self._due = 0.0
        self._delayed = delayed
        self.ended = False

    def look(self) -> None:
        """Receive the available messages one by one, and schedule the delivery of each."""
        while not self.ended:
            size = self._sizes[0] if self._sizes else _MESSAGE.size
            try:
                data, fds, _, _ = socket.recv_fds(self._source, size, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if self._sizes:
                self._sizes.pop(0)
            self.ended = not data
            self._due = max(self._due, self._network.now + self._network.delay(self._delayed))
            self._network.at(self._due, lambda data=data, fds=fds: self._deliver(data, fds))
            self._network.maybe_block()

    def _deliver(self, data: bytes, fds: list[int]) -> None:
        with suppress(OSError):
            if data:
                socket.send_fds(self._target, [data], fds)
            else:
                self._target.shutdown(socket.SHUT_WR)
        for fd in fds:
            socket.close(fd)


class Event(NamedTuple):
    """An action of the network at a given virtual time."""

    when: float
    number: int
    do: Callable[[], object]


class Network:
    """Two ranks, the clock of their loops, and the connections between them.

    Args:
        seed: The seed of all random choices.
        transport: `"unix"` or `"shm"`.
    """

    def __init__(self, seed: int, transport: str) -> None:
        self.now = 0.0
        self.errors: list[dict[str, Any]] = []
        self.random = chance = random.Random(seed)
        self._events: list[Event] = []
        self._count = 0
        self._relays: list[Relay] = []
        self._sockets: list[socket.socket] = []
        self._dials = [0, 0]
        timers_first = chance.random() < 0.5
        self.ranks = [SimulatedRank(self, rank, chance.getrandbits(32), transport, timers_first) for rank in (0, 1)]
        #: The probability that a handshake message blocks an event loop.
        self._blocking = chance.choice((0.0, 0.1, 0.3))
        self._delayed = chance.choice((0.0, 0.2, 0.5))
        for _ in range(chance.randrange(6)):
            self.at(chance.uniform(0, 2 * LONGEST), self._block)

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Route all dials through this network inside the context; close all ranks and sockets at the end."""
        with monkeypatch.context() as patch:
            patch.setattr(addresses, "reach", self._reach)
            try:
                yield
                self.run(*(rank.close() for rank in self.ranks))
            finally:
                for sock in self._sockets:
                    sock.close()
                for rank in self.ranks:
                    rank.loop.close()

    def run(self, *programs: Coroutine[Any, Any, None]) -> None:
        """Run one coroutine per rank until all coroutines have finished."""
        tasks = [rank.loop.create_task(each) for rank, each in zip(self.ranks, programs, strict=True)]
        self._run(lambda: all(task.done() for task in tasks), LIMIT)
        for task in tasks:
            assert task.done(), f"deadlock, or unfinished after {LIMIT:g} virtual s: {task}"
            task.result()

    def settle(self) -> None:
        """Run until all delayed messages and timers have been processed."""
        end = self.now + 10 * LONGEST
        self.at(end, lambda: None)
        self._run(lambda: False, end)

    def at(self, when: float, do: Callable[[], object]) -> None:
        """Schedule a call of `do` at the virtual time `when`."""
        self._count += 1
        heapq.heappush(self._events, Event(when, self._count, do))

    def delay(self, share: float) -> float:
        """Return a random delay of a message in seconds, or 0 for all except a proportion `share` of the messages."""
        return self.random.uniform(0, LONGEST) if self.random.random() < share else 0.0

    def maybe_block(self) -> None:
        """Block a random event loop for some time, with the probability of this simulation."""
        if self.random.random() < self._blocking:
            self._block()

    def _block(self) -> None:
        loop = self.random.choice(self.ranks).loop
        loop.blocked_until = max(loop.blocked_until, self.now + self.random.uniform(0, LONGEST))

    def _run(self, done: Callable[[], bool], end: float) -> None:
        loops = [rank.loop for rank in self.ranks]
        while not done() and self.now <= end:
            able = [loop for loop in loops if loop.blocked_until <= self.now and loop.has_work()]
            due = self._events and self._events[0].when <= self.now
            if due and (not able or self.random.random() < 0.5):
                heapq.heappop(self._events).do()
            elif able:
                self.random.choice(able).step()
            else:
                times = [max(loop.next_timer, loop.blocked_until) for loop in loops]
                times += [loop.blocked_until for loop in loops if loop.blocked_until > self.now]
                times += [event.when for event in self._events[:1]]
                if min(times) == float("inf"):
                    return
                self.now = min(times)
                continue
            for relay in self._relays:
                relay.look()

    async def _reach(
        self,
        loop: RankLoop,
        family: int,
        target: str,
        *,
        in_bursts: bool = False,
        connecting: Callable[[int], object] | None = None,
    ) -> socket.socket:
        """Connect to a rank through this network, in place of `addresses.reach`."""
        rank = int(target[1:])
        near, far = socket.socketpair(), socket.socketpair()
        for sock in (*near, *far):
            sock.setblocking(False)
            self._sockets.append(sock)
        self._dials[rank] += 1
        delayed = self._delayed if self._dials[rank] <= SLOW_DIALS else self._delayed / 10
        begins = self.now + self.delay(delayed)
        filled = begins > self.now
        self.at(begins, lambda: self._connected(rank, near, far, delayed, filled))
        if filled:
            near[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            with suppress(BlockingIOError):
                while True:
                    near[0].send(bytes(BUFFER))
            connected = loop.create_future()
            if connecting is not None:
                connecting(near[0].fileno())
            loop.add_writer(near[0], resolve, connected)
            try:
                await connected
            except BaseException:
                loop.remove_writer(near[0])
                near[0].close()
                raise
            loop.remove_writer(near[0])
        return near[0]

    def _connected(
        self,
        rank: int,
        near: tuple[socket.socket, socket.socket],
        far: tuple[socket.socket, socket.socket],
        delayed: float,
        filled: bool,
    ) -> None:
        if filled:
            with suppress(BlockingIOError):
                while near[1].recv(1 << 16):
                    pass
        self._relays.append(Relay(self, near[1], far[1], FROM_DIALLER, delayed))
        self._relays.append(Relay(self, far[1], near[1], FROM_ACCEPTOR, delayed))
        listening = self.ranks[rank]
        listening.loop.call_soon(listening.transport._greet, far[0])
