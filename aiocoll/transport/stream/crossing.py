"""Which connection becomes the link when two ranks dial each other at once: at most one of a kind, whoever dials.

Each rank may open one, A by the lower rank and B by the higher, and both are safe to try at the same time. A server
promises (VERDICT: OK) and waits for the client's last message (CONFIRM), and the higher rank, which is the server of A
and the client of B, does only one of the two at a time:

    rank 0                            rank 1
      A: PROOF     ------>              B not confirmed: promises A, and confirms B only if A fails
                   <------  A: OK
      A: CONFIRM   ------>              A is the link

      A: PROOF     ------>              B confirmed: declines A
                   <------  B: CONFIRM  B is the link
                   <------  A: CROSSED

The lower rank promises B whatever A does, and confirms A whenever it is promised. So the order in which the higher rank
acts decides, no message can be late enough to change it, and neither waits for what the other has not proven to be
doing: a dial that has got no further than its HELLO counts for nothing, at the end that dials as at the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiocoll.security.handshake import Status
from aiocoll.transport.stream.link_table import Key, LinkTable

__all__ = ["Crossing"]


class Crossing:
    """What one rank has promised to, and confirmed with, peers that have proven themselves.

    Args:
        rank: this rank.
        world_size: ranks of the job.
        links: its links.
    """

    def __init__(self, rank: int, world_size: int, links: LinkTable) -> None:
        self._rank = rank
        self._world_size = world_size
        self._links = links
        self._promised: dict[Key, asyncio.Future[None]] = {}
        self._confirmed: set[Key] = set()

    def decide(self, key: Key) -> Status:
        """Say what to answer a peer that has proven itself and asks for this link."""
        peer = key[0]
        if peer == self._rank or not 0 <= peer < self._world_size:
            return Status.REFUSED
        if self._links.has(key):
            return Status.DUPLICATE
        return Status.CROSSED if key in self._promised or key in self._confirmed else Status.OK

    @contextmanager
    def promise(self, key: Key) -> Iterator[None]:
        """Wait in this context for the last message of a peer that is told OK, and make the link."""
        over = self._promised[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._promised[key]
            over.set_result(None)

    def promised(self, key: Key) -> asyncio.Future[None] | None:
        """Return what ends together with the promise of this link, if there is one."""
        return self._promised.get(key)

    def may_confirm(self, key: Key) -> bool:
        """Whether this rank, told OK, may take the connection that it has dialled."""
        return not self._links.has(key) and (self._rank < key[0] or key not in self._promised)

    @contextmanager
    def confirm(self, key: Key) -> Iterator[None]:
        """Send the last message in this context, and make the link."""
        self._confirmed.add(key)
        try:
            yield
        finally:
            self._confirmed.discard(key)
