"""Shared memory of one rank: whether the rank can use it, and its set-up with each peer."""

from __future__ import annotations

import socket
import sys
from collections.abc import Coroutine
from typing import Any

from aiocoll.log import logger
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Transport
from aiocoll.transport.shm import dial
from aiocoll.transport.shm.dial import NotSharedError
from aiocoll.transport.shm.doorbell import Doorbell
from aiocoll.transport.shm.fence import fences, has_atomic_stores
from aiocoll.transport.shm.layout import LinkLayout, OutboxLayout
from aiocoll.transport.shm.link import LinkParts, OwnPart
from aiocoll.transport.shm.outbox import Outbox
from aiocoll.transport.shm.references import InPlace
from aiocoll.transport.shm.registered_memory import RegisteredMemory

__all__ = ["Sharing"]


class Sharing:
    """The shared memory of one rank: doorbell, outbox, registered memory, and the set-up of links.

    Args:
        runtime: the runtime of the rank's loop.
        rank: this rank.
        ranks: the largest number of ranks on this host.
        watcher: the transport that runs on the loop.
        wanted: whether the options request shared memory.
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
        #: The memory that peers may read in place.
        self.in_place = InPlace(self.registered_memory, runtime.random_bytes if single_copy else None)
        #: The reason why this rank shares no memory; None while it can share memory.
        self.trouble: str | None = None
        if not wanted:
            self.trouble = "the options request another transport"
        elif sys.platform != "linux":
            self.trouble = "shared memory needs memfd and eventfd, which only Linux has"
        elif not has_atomic_stores():
            self.trouble = "this process stores words of 8 bytes in two steps, so a peer could read half a word"
        elif self._fences is None:
            self.trouble = "this machine orders memory weakly, and libatomic was not found; install libatomic"

    @property
    def chunk_nbytes(self) -> int:
        """Return the maximum chunk size in bytes, twice the maximum slot size; 0 without shared memory."""
        return 0 if self.trouble is not None else self._layout.directions[0].chunk_nbytes

    @property
    def reads(self) -> bool:
        """Return whether ranks may read each other's memory in place, and a test read of this process succeeds."""
        return self.trouble is None and self.in_place.is_wanted

    async def propose(self, sock: socket.socket, peer: int) -> LinkParts | None:
        """Offer shared memory to the rank that was dialled; return None if the link must use the socket."""
        own = self._make_own_part(peer)
        if own is None:
            dial.decline(sock)
            return None
        return await self._agree(dial.propose(sock, own), own)

    async def accept(self, sock: socket.socket, peer: int) -> LinkParts | None:
        """Accept the shared memory that the dialling rank offers; return None if the link must use the socket."""
        own = self._make_own_part(peer)
        return await self._agree(dial.accept(sock, own), own)

    async def _agree(self, passed: Coroutine[Any, Any, LinkParts | None], own: OwnPart | None) -> LinkParts | None:
        """Return the link parts on which both ends agree; if there are none, release this rank's part `own`."""
        pair = None
        try:
            pair = await passed
        except NotSharedError as error:
            self._stop_sharing(error)
        finally:
            if pair is None and own is not None:
                own.drop()
        return pair

    def release_parts(self, pair: LinkParts) -> None:
        """Release the parts of a link that will not be made."""
        pair.region.close()
        pair.peer.close()
        pair.own.drop()

    def catch_up(self) -> None:
        """Deliver the frames that peers have written to shared memory so far."""
        if self._doorbell is not None and not self._doorbell.closed:
            self._doorbell.poll()

    def _make_own_part(self, peer: int) -> OwnPart | None:
        """Return this rank's part of a link to a peer; None if there is no shared memory."""
        if self.trouble is not None:
            return None
        doorbell = lane = None
        try:
            doorbell = self._open_doorbell()
            lane = doorbell.outbox.open_lane(peer)
        except OSError as error:
            self._stop_sharing(error)
        if doorbell is not None and lane is not None:
            return OwnPart(self._layout, doorbell, lane, self._rank, peer, self.in_place.memory)
        if doorbell is not None:
            doorbell.drop()
        return None

    def _open_doorbell(self) -> Doorbell:
        """Return a new reference to the doorbell. Make the doorbell and the outbox on first use.

        Raises:
            OSError: no memory or descriptor is left, or the kernel forbids it.
        """
        if self._doorbell is None or self._doorbell.closed:
            assert self._fences is not None
            outbox = Outbox(self._outbox_layout, self._fences)
            self._doorbell = Doorbell(self._runtime, self._fences, self._watcher, outbox)
        self._doorbell.hold()
        return self._doorbell

    def _stop_sharing(self, error: Exception) -> None:
        """Share no more memory with new links, and log the reason once."""
        if self.trouble is None:
            # Keep only the error's text, because its traceback would keep memory mapped.
            self.trouble = why = str(error)
            logger.warning(
                "rank %d uses unix sockets instead of shared memory: %s", self._rank, why, extra={"rank": self._rank}
            )
