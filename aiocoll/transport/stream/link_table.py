"""The open links of one rank: at most one of a kind with each peer, each on the best medium both ends have."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from math import inf

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind, Peer
from aiocoll.sockets import UNREACHABLE_AFTER, between_hosts, keep_asking, round_trip, send_evenly, silence
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.registry import DataCarrier, DataLink
from aiocoll.transport.shm.link import ShmLink
from aiocoll.transport.shm.transport import Sharing
from aiocoll.transport.stream.link import StreamLink
from aiocoll.transport.stream.striped_stream import StripedStream

__all__ = ["FAR", "MOST_CONNECTIONS", "CarrierUse", "Key", "LinkTable", "Silence"]

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # not on Windows
#: Counts of links travel in the handshake modulo this number.
MANY = 1 << 16
#: Connections of a link: more gain little, and take from others what they share the network with.
MOST_CONNECTIONS = 4

#: Seconds of a round trip from which connections are paced. Queues hold the window of a nearer one, and the timers that
#: pace it take more than they save.
FAR = 1e-3

#: Seconds between two looks at silent links. One takes 2 microseconds per link.
_SILENCE_ROUND = 0.5

_Link = StreamLink | ShmLink | DataLink

Key = tuple[int, ConnKind]
"""The peer, and what the link is for."""


class Silence:
    """Watches the links of one rank to other hosts, and closes those from which nothing comes with a network error.

    Twice a second it asks the kernel, which knows more than any timer of a process: hosts answer each other even while
    the processes on them are blocked or stopped. So it also detects that two ranks are disconnected from each other
    while the ranks that monitor both of them can reach both.

    Args:
        runtime: clock and timers.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._watched: dict[socket.socket, DataLink] = {}

    def watch(self, link: DataLink, sock: socket.socket) -> None:
        """Watch one of the connections of a link until that is closed."""
        keep_asking(sock)
        if not self._watched:
            self._runtime.call_later(_SILENCE_ROUND, self._look)
        self._watched[sock] = link

    def _look(self) -> None:
        for sock, link in list(self._watched.items()):
            if link.closed:
                del self._watched[sock]
            elif (seconds := silence(sock)) >= UNREACHABLE_AFTER:
                link.fail(OSError(errno.ETIMEDOUT, f"nothing has come from its host for {seconds:.1f} s"))
        if self._watched:
            self._runtime.call_later(_SILENCE_ROUND, self._look)


class CarrierUse:
    """Which data links the carrier of a rank takes over; the ranks agree on it after they have published their cards.

    Args:
        carrier: the carrier that this rank offers, or None.
        carries_all: it takes over all data links, and not only those over TCP.

    Attributes:
        used: the ranks have agreed to use it.
    """

    def __init__(self, carrier: DataCarrier | None, *, carries_all: bool) -> None:
        self.used = False
        self._carrier = carrier
        self._carries_all = carries_all
        self._agreed = asyncio.Event()

    def agree(self, used: bool) -> None:
        """Use the carrier or not."""
        self.used = used
        self._agreed.set()

    async def carrier(self, sock: socket.socket) -> DataCarrier | None:
        """Return what makes a data link of a connection; None if the connection itself, or shared memory, does."""
        if self._carrier is None or not (self._carries_all or sock.family != _AF_UNIX):
            return None
        await self._agreed.wait()  # the peer may have read the cards earlier than this rank
        return self._carrier if self.used else None


class LinkTable:
    """Makes links of streams whose handshake is complete.

    Args:
        runtime: of the loop.
        sharing: the shared memory of this rank.
        carrier_use: which data links its carrier takes over.
    """

    def __init__(self, runtime: Runtime, sharing: Sharing, carrier_use: CarrierUse) -> None:
        self.sharing = sharing
        self.carrier_use = carrier_use
        self._runtime = runtime
        self._pool = BufferPool()
        self._silence = Silence(runtime)
        self._links: dict[Key, _Link] = {}
        # How many are over, and how many were at the peer when the one that is open began.
        self._ended: Counter[Key] = Counter()
        self._theirs: dict[Key, int] = {}
        # Of data links that may have further connections.
        self._striped: dict[int, StripedStream] = {}

    def has(self, key: Key) -> bool:
        """Whether there is such a link."""
        link = self._links.get(key)
        if link is not None and link.closed:
            del self._links[key]
            self._striped.pop(key[0], None)
            self._ended[key] += 1
            return False
        return link is not None

    def ended(self, key: Key) -> int:
        """Return how many such links are over, modulo 65536: what the handshake tells the peer."""
        self.has(key)
        return self._ended[key] % MANY

    def catch_up(self, key: Key, ended: int) -> None:
        """Close a link which is over for the peer: `ended` more are than when it began."""
        link = self._links.get(key)
        if link is not None and 0 < (ended - self._theirs[key]) % MANY < MANY // 2:
            link.fail(ConnectionResetError(errno.ECONNRESET, "the peer has lost the connection, and opens another"))

    async def adopt(self, stream: ByteStream, peer: Peer, *, dialled: bool, striped: bool) -> _Link | None:
        """Make a link of `stream`; None if there is one by now, and `stream` is still the caller's.

        Both ends do this after the handshake, the one that dialled with `dialled`, and both with `striped` if the link
        will have further connections. A data link between processes of one host is moved to shared memory, if both can.

        Raises:
            OSError: the peer closed the connection.
            ProtocolError: it offered what is no shared memory.
        """
        key = peer.rank, peer.kind
        sock = stream.sock
        pair = carried = None
        if key[1] is ConnKind.DATA:
            if (carrier := await self.carrier_use.carrier(sock)) is not None:
                carried = await carrier.open(stream, peer.rank, dialled=dialled)
            elif sock.family == _AF_UNIX:
                share = self.sharing.propose if dialled else self.sharing.accept
                pair = await share(sock, peer.rank)
        if self.has(key):
            if pair is not None:
                self.sharing.give_up(pair)
            if carried is not None:
                carried.close()
            return None
        link: _Link
        if carried is not None:
            link = carried
            if between_hosts(sock):
                self._silence.watch(link, sock)
        elif pair is not None:
            link = ShmLink(self._runtime, stream, pair, self.sharing.in_place, *key)
        else:
            if striped:
                stream = self._striped[peer.rank] = StripedStream(self._runtime.loop, stream)
            link = StreamLink(self._runtime, stream, *key, self._pool)
            self._prepare(link, sock)
        self._links[key] = link
        self._theirs[key] = peer.ended
        return link

    def add(self, peer: int, stream: ByteStream) -> bool:
        """Use a further connection for the data link with `peer`; False if there is no such link, or it has enough."""
        striped = self._striped.get(peer)
        if not self.has((peer, ConnKind.DATA)) or striped is None or striped.connections == MOST_CONNECTIONS:
            return False
        striped.add(stream)
        link = self._links[peer, ConnKind.DATA]
        if isinstance(link, StreamLink):
            self._prepare(link, stream.sock)
        return True

    def _prepare(self, link: StreamLink, sock: socket.socket) -> None:
        """Prepare a connection of a link, if that is between hosts."""
        if between_hosts(sock):
            if FAR <= round_trip(sock) < inf:
                send_evenly(sock)
            self._silence.watch(link, sock)

    async def adopt_bare(self, stream: ByteStream, peer: Peer) -> ByteStream | None:
        """Return `stream`, which is to carry no frames: it counts as a link that is over."""
        self._ended[peer.rank, peer.kind] += 1
        return stream

    def carrier(self, peer: int) -> str:
        """Return what carries data between this rank and `peer`: "shm", "unix", "tcp", or "none" as yet."""
        link = self._links.get((peer, ConnKind.DATA))
        return "none" if link is None else link.carrier
