"""Choice between two connections when two ranks dial each other at once, so that one link of each kind remains.

The lower rank may dial connection A, the higher rank connection B, at the same time. A server promises a link (VERDICT:
OK) and then waits for the client's last message (CONFIRM). The higher rank is the server of A and the client of B. It
does only one of the two at a time, either promise A or confirm B:

    rank 0                            rank 1
      A: PROOF     ------>              B not confirmed: promises A, and confirms B only if A fails
                   <------  A: OK
      A: CONFIRM   ------>              A is the link

      A: PROOF     ------>              B confirmed: declines A
                   <------  B: CONFIRM  B is the link
                   <------  A: CROSSED

The lower rank promises B whatever the state of A, and confirms A whenever A is promised. So the order in which the
higher rank acts decides, and no late message can change the decision. Neither rank waits for a connection before the
other has proven the job key on it: a dial that has only sent its HELLO has no effect on either end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiocoll.security.handshake import Status
from aiocoll.transport.stream.link_table import Key, LinkTable

__all__ = ["Crossing"]


class Crossing:
    """The promises and confirmations of links that one rank gives to peers that have proven the job key.

    Args:
        rank: this rank.
        world_size: number of ranks in the job.
        links: the links of this rank.
    """

    def __init__(self, rank: int, world_size: int, links: LinkTable) -> None:
        self._rank = rank
        self._world_size = world_size
        self._links = links
        self._promised: dict[Key, asyncio.Future[None]] = {}
        self._confirmed: set[Key] = set()

    def decide(self, key: Key) -> Status:
        """Return the status to send to a peer that has proven the job key and requests a link."""
        peer = key[0]
        if peer == self._rank or not 0 <= peer < self._world_size:
            return Status.REFUSED
        if self._links.has(key):
            return Status.DUPLICATE
        return Status.CROSSED if key in self._promised or key in self._confirmed else Status.OK

    @contextmanager
    def promise(self, key: Key) -> Iterator[None]:
        """Register a promise to accept a link until this context ends. The caller completes the handshake in it."""
        over = self._promised[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._promised[key]
            over.set_result(None)

    def promised(self, key: Key) -> asyncio.Future[None] | None:
        """Return a future that is done when this rank's promise of a link ends; None if there is no promise."""
        return self._promised.get(key)

    def may_confirm(self, key: Key) -> bool:
        """Return whether this rank, which has dialled and received OK, may confirm the connection."""
        return not self._links.has(key) and (self._rank < key[0] or key not in self._promised)

    @contextmanager
    def confirm(self, key: Key) -> Iterator[None]:
        """Register the confirmation of a link until this context ends. The caller sends CONFIRM in it."""
        self._confirmed.add(key)
        try:
            yield
        finally:
            self._confirmed.discard(key)
