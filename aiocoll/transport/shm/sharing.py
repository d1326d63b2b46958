"""Whether this rank shares memory, with whom, and why not."""

from __future__ import annotations

import socket
import sys
from collections.abc import Coroutine
from typing import Any

from aiocoll.log import logger
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Transport
from aiocoll.transport.shm import passing
from aiocoll.transport.shm.doorbell import Doorbell
from aiocoll.transport.shm.fence import fences, stores_words
from aiocoll.transport.shm.layout import LinkLayout, OutboxLayout
from aiocoll.transport.shm.link import Own, Pair
from aiocoll.transport.shm.outbox import Outbox
from aiocoll.transport.shm.passing import NotSharedError
from aiocoll.transport.shm.references import InPlace
from aiocoll.transport.shm.registered_memory import RegisteredMemory

__all__ = ["Sharing"]


class Sharing:
    """The shared memory of one rank.

    Args:
        runtime: of its loop.
        rank: this rank.
        ranks: how many ranks this host may have at most.
        watcher: whose loop it is.
        wanted: whether the options ask for shared memory.
        single_copy: whether ranks may read each other's memory.
    """

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        ranks: int,
        watcher: Transport,
        *,
        wanted: bool,
        single_copy: bool,
    ) -> None:
        self._runtime = runtime
        self._rank = rank
        self._watcher = watcher
        self._layout = LinkLayout(ranks)
        self._outbox_layout = OutboxLayout(ranks)
        self._fences = fences() if wanted else None
        self._doorbell: Doorbell | None = None
        self.registered_memory = RegisteredMemory(runtime.loop)
        #: What peers may read where it lies.
        self.in_place = InPlace(self.registered_memory, runtime.random_bytes if single_copy else None)
        #: Why there is none, as far as this rank is concerned; None as long as there is.
        self.trouble: str | None = None
        if not wanted:
            self.trouble = "the options ask for another transport"
        elif sys.platform != "linux":
            self.trouble = "it needs memfd and eventfd, which only Linux has"
        elif not stores_words():
            self.trouble = "this process stores words of 8 bytes in two steps, so a peer could read half of one"
        elif self._fences is None:
            self.trouble = "this machine orders memory weakly, and libatomic is not installed"

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the largest chunk; the largest slot holds half of it. 0 if there is no shared memory."""
        return 0 if self.trouble is not None else self._layout.directions[0].chunk_nbytes

    @property
    def reads(self) -> bool:
        """Whether this rank and its peers may read each other's memory, as far as it can tell before they try."""
        return self.trouble is None and self.in_place.is_wanted

    async def propose(self, sock: socket.socket, peer: int) -> Pair | None:
        """Offer memory to the rank that has been dialled; None if the socket has to do."""
        own = self._hold(peer)
        if own is None:
            passing.decline(sock)
            return None
        return await self._agree(passing.propose(sock, own), own)

    async def accept(self, sock: socket.socket, peer: int) -> Pair | None:
        """Take the memory that the dialling rank offers; None if the socket has to do."""
        own = self._hold(peer)
        return await self._agree(passing.accept(sock, own), own)

    async def _agree(self, passed: Coroutine[Any, Any, Pair | None], own: Own | None) -> Pair | None:
        """Return what the two ends agree on; the references of `own` go with it, or are dropped."""
        pair = None
        try:
            pair = await passed
        except NotSharedError as error:
            self._fail(error)
        finally:
            if pair is None and own is not None:
                own.drop()
        return pair

    def give_up(self, pair: Pair) -> None:
        """Return what would have become a link."""
        pair.region.close()
        pair.peer.close()
        pair.own.drop()

    def catch_up(self) -> None:
        """Hand out what peers have written by now."""
        if self._doorbell is not None and not self._doorbell.closed:
            self._doorbell.poll()

    def _hold(self, peer: int) -> Own | None:
        """Return what this rank brings to a link with a peer; None if there is no shared memory."""
        if self.trouble is not None:
            return None
        doorbell = lane = None
        try:
            doorbell = self._open_doorbell()
            lane = doorbell.outbox.open_lane(peer)
        except OSError as error:
            self._fail(error)
        if doorbell is not None and lane is not None:
            return Own(self._layout, doorbell, lane, self._rank, peer, self.in_place.memory)
        if doorbell is not None:
            doorbell.drop()
        return None

    def _open_doorbell(self) -> Doorbell:
        """Return a reference to the doorbell, with which the outbox is made.

        Raises:
            OSError: there is no memory or descriptor left, or the kernel forbids it.
        """
        if self._doorbell is None or self._doorbell.closed:
            assert self._fences is not None
            outbox = Outbox(self._outbox_layout, self._fences)
            self._doorbell = Doorbell(self._runtime, self._fences, self._watcher, outbox)
        self._doorbell.hold()
        return self._doorbell

    def _fail(self, error: Exception) -> None:
        """Try no more, and log that once."""
        if self.trouble is None:
            # Not the error itself, whose traceback would keep memory alive.
            self.trouble = why = str(error)
            logger.warning(
                "rank %d uses unix sockets instead of shared memory: %s", self._rank, why, extra={"rank": self._rank}
            )
