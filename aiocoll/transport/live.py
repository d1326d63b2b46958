"""The open links of one rank: at most one of a kind with each peer, each on the best carrier both ends have."""

from __future__ import annotations

import socket

from aiocoll.handshake import ConnKind
from aiocoll.runtime import Runtime
from aiocoll.sockets import between_hosts
from aiocoll.transport.shm.link import ShmLink
from aiocoll.transport.shm.sharing import Sharing
from aiocoll.transport.silence import Silence
from aiocoll.transport.spares import Spares
from aiocoll.transport.stream_link import StreamLink

__all__ = ["Key", "Live"]

Key = tuple[int, ConnKind]
"""The peer, and what the link is for."""

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # not on Windows


class Live:
    """Makes links of sockets whose handshake is complete.

    Args:
        runtime: of the loop.
        sharing: the shared memory of this rank.
    """

    def __init__(self, runtime: Runtime, sharing: Sharing) -> None:
        self.sharing = sharing
        self._runtime = runtime
        self._spares = Spares()
        self._silence = Silence(runtime)
        self._links: dict[Key, StreamLink | ShmLink] = {}

    def has(self, key: Key) -> bool:
        """Whether there is such a link."""
        link = self._links.get(key)
        if link is not None and link.closed:
            del self._links[key]
            return False
        return link is not None

    async def adopt(self, sock: socket.socket, key: Key, *, dialled: bool) -> StreamLink | ShmLink | None:
        """Make a link of `sock`; None if there is one by now, and `sock` is still the caller's.

        Both ends do this after the handshake, the one that dialled with `dialled`. A data link between processes of
        one host is moved to shared memory, if both can.

        Raises:
            OSError: the peer closed the connection.
            ProtocolError: it offered what is no shared memory.
        """
        pair = None
        if sock.family == _AF_UNIX and key[1] is ConnKind.DATA:
            share = self.sharing.propose if dialled else self.sharing.accept
            pair = await share(sock)
        if self.has(key):
            if pair is not None:
                self.sharing.give_up(pair)
            return None
        link: StreamLink | ShmLink
        if pair is not None:
            link = ShmLink(self._runtime, sock, pair, *key)
        else:
            link = StreamLink(self._runtime, sock, *key, self._spares)
            if between_hosts(sock):
                self._silence.watch(link, sock)
        self._links[key] = link
        return link

    def carrier(self, peer: int) -> str:
        """Say what carries data between this rank and `peer`: "shm", "unix", "tcp", or "none" as yet."""
        link = self._links.get((peer, ConnKind.DATA))
        return "none" if link is None else link.carrier
