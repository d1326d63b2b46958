"""Open links of one rank: at most one of each kind per peer, each on the best medium that both ends support."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from math import inf

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind, Peer
from aiocoll.sockets import UNREACHABLE_AFTER, enable_keepalive, is_between_hosts, round_trip, send_evenly, silence
from aiocoll.transport.buffer_pool import BufferPool
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.registry import DataCarrier, DataLink
from aiocoll.transport.shm.link import ShmLink
from aiocoll.transport.shm.transport import Sharing
from aiocoll.transport.stream.link import StreamLink
from aiocoll.transport.stream.striped_stream import StripedStream

__all__ = ["FAR", "MOST_CONNECTIONS", "CarrierUse", "Key", "LinkTable", "SilenceMonitor"]

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # does not exist on Windows
#: Modulus of the number of ended links in handshakes, which send it in 16 bits.
MANY = 1 << 16
#: Maximum number of connections per link. More connections gain little, and take bandwidth from other network users.
MOST_CONNECTIONS = 4

#: Minimum round-trip time in seconds for which sending is paced. At shorter times, network queues hold a whole window,
#: and the pacing timers cost more than they save.
FAR = 1e-3

#: Seconds between two checks for silent links. A check takes 2 µs per link.
_SILENCE_ROUND = 0.5

_Link = StreamLink | ShmLink | DataLink

Key = tuple[int, ConnKind]
"""The peer and the kind of link."""


class SilenceMonitor:
    """The monitor of one rank's links to other hosts. It closes links on which nothing arrives, with a network error.

    Twice a second it reads from the kernel how long each connection has been silent. Kernels answer each other even
    while the processes on their hosts are blocked or stopped. So the monitor also detects two ranks that cannot reach
    each other, while the ranks that monitor both can reach both.

    Args:
        runtime: clock and timers.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._watched: dict[socket.socket, DataLink] = {}

    def watch(self, link: DataLink, sock: socket.socket) -> None:
        """Monitor one connection of a link, until the link is closed."""
        enable_keepalive(sock)
        if not self._watched:
            self._runtime.call_later(_SILENCE_ROUND, self._look)
        self._watched[sock] = link

    def _look(self) -> None:
        for sock, link in list(self._watched.items()):
            if link.closed:
                del self._watched[sock]
            elif (seconds := silence(sock)) >= UNREACHABLE_AFTER:
                link.fail(OSError(errno.ETIMEDOUT, f"no answer from its host for {seconds:.1f} s"))
        if self._watched:
            self._runtime.call_later(_SILENCE_ROUND, self._look)


class CarrierUse:
    """The decision whether data links use a carrier. The ranks agree on it when all cards are published.

    Args:
        carrier: the carrier that this rank offers, or None.
        carries_all: the carrier makes all data links, not only those over TCP.

    Attributes:
        used: whether the ranks have agreed to use it.
    """

    def __init__(self, carrier: DataCarrier | None, *, carries_all: bool) -> None:
        self.used = False
        self._carrier = carrier
        self._carries_all = carries_all
        self._agreed = asyncio.Event()

    def agree(self, used: bool) -> None:
        """Record whether the ranks have agreed to use the carrier."""
        self.used = used
        self._agreed.set()

    async def carrier(self, sock: socket.socket) -> DataCarrier | None:
        """Return the carrier for a connection's data link; None if the link uses the socket or shared memory."""
        if self._carrier is None or not (self._carries_all or sock.family != _AF_UNIX):
            return None
        await self._agreed.wait()  # the peer may have read the cards earlier than this rank, and opened a link already
        return self._carrier if self.used else None


class LinkTable:
    """The table of a rank's links, which makes a link from each stream whose handshake is complete.

    Args:
        runtime: clock, timers and event loop.
        sharing: the shared memory of this rank.
        carrier_use: the use of this rank's carrier.
    """

    def __init__(self, runtime: Runtime, sharing: Sharing, carrier_use: CarrierUse) -> None:
        self.sharing = sharing
        self.carrier_use = carrier_use
        self._runtime = runtime
        self._pool = BufferPool()
        self._silence = SilenceMonitor(runtime)
        self._links: dict[Key, _Link] = {}
        # For each peer and kind: how many links have ended here, and how many at the peer when the open link was made.
        self._ended: Counter[Key] = Counter()
        self._theirs: dict[Key, int] = {}
        # For each peer, the stream of the data link if it may get further connections.
        self._striped: dict[int, StripedStream] = {}

    def has(self, key: Key) -> bool:
        """Return whether a link of this kind to this peer is open."""
        link = self._links.get(key)
        if link is not None and link.closed:
            del self._links[key]
            self._striped.pop(key[0], None)
            self._ended[key] += 1
            return False
        return link is not None

    def ended(self, key: Key) -> int:
        """Return how many links of this kind to this peer have ended, modulo 65536, for the handshake."""
        self.has(key)
        return self._ended[key] % MANY

    def catch_up(self, key: Key, ended: int) -> None:
        """Close a link that has ended at the peer: the peer's count `ended` has grown since the link was made."""
        link = self._links.get(key)
        if link is not None and 0 < (ended - self._theirs[key]) % MANY < MANY // 2:
            link.fail(ConnectionResetError(errno.ECONNRESET, "the peer has lost the connection and opens a new one"))

    async def adopt(self, stream: ByteStream, peer: Peer, *, dialled: bool, striped: bool) -> _Link | None:
        """Make a link from `stream`; return None if there is a link already. The caller then still owns `stream`.

        Both ends call this after the handshake. `dialled` is True at the end that dialled. `striped` is True at both
        ends if the link will have further connections. A data link inside a host uses shared memory if both ends
        support it.

        Raises:
            OSError: the peer closed the connection.
            ProtocolError: the peer offered invalid shared memory.
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
                self.sharing.release_parts(pair)
            if carried is not None:
                carried.close()
            return None
        link: _Link
        if carried is not None:
            link = carried
            if is_between_hosts(sock):
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
        """Add another connection to the data link to `peer`.

        Returns:
            Whether it was added. It is not if there is no such link, or if the link has the maximum number.
        """
        striped = self._striped.get(peer)
        if not self.has((peer, ConnKind.DATA)) or striped is None or striped.connections == MOST_CONNECTIONS:
            return False
        striped.add(stream)
        link = self._links[peer, ConnKind.DATA]
        if isinstance(link, StreamLink):
            self._prepare(link, stream.sock)
        return True

    def _prepare(self, link: StreamLink, sock: socket.socket) -> None:
        """Start to pace and monitor a connection between hosts."""
        if is_between_hosts(sock):
            if FAR <= round_trip(sock) < inf:
                send_evenly(sock)
            self._silence.watch(link, sock)

    async def adopt_stream(self, stream: ByteStream, peer: Peer) -> ByteStream | None:
        """Return `stream` unchanged, for a connection without frames. Count the connection as an ended link."""
        self._ended[peer.rank, peer.kind] += 1
        return stream

    def carrier(self, peer: int) -> str:
        """Return the medium of the data link to `peer`: "shm", "unix", "tcp", or "none" if no link is open."""
        link = self._links.get((peer, ConnKind.DATA))
        return "none" if link is None else link.carrier
