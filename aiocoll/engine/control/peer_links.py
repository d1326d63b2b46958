"""Control links between ranks of which neither is the hub, since the hub may be what does not answer.

A lost rank is reached again in the same way: a new link, or an answer on the one there is, shows that it lives.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiocoll.engine.control.messages import Note
from aiocoll.engine.control.sending import send_note
from aiocoll.errors import AiocollError
from aiocoll.log import logger
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Link

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["PeerLinks"]

#: Seconds in which a lost rank is to be reached again before what waits for it is dropped; it is said again anyway.
REACH = 2.0


class PeerLinks:
    """Opens control links beside the star, when there is something to say; the control plane owns them then."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._held: dict[int, list[Note]] = {}
        self._dialling: set[int] = set()

    def tell(self, rank: int, note: Note) -> None:
        """Send `note` to `rank` on a link between this rank and that one."""
        endpoint = self._endpoint
        control = endpoint.control
        if endpoint.closed or control.hub in (rank, endpoint.rank) or control.linked(rank):
            control.tell(rank, note)
            return
        self.send(rank, note)

    def send(self, rank: int, note: Note) -> None:
        """Send `note` to `rank` on a link of their own, whichever rank is the hub and even if `rank` is lost."""
        link = self._endpoint.control.link(rank)
        if link is not None:
            send_note(link, note)
        elif not self._endpoint.closed:
            self._held.setdefault(rank, []).append(note)
            self._connect(rank)

    def reach(self, rank: int) -> None:
        """Find out whether a lost rank can be reached again."""
        self.send(rank, {"t": "probe"})

    def _connect(self, rank: int) -> None:
        if rank not in self._dialling and not self._endpoint.control.dials(rank):
            self._dialling.add(rank)
            self._endpoint.spawn(self._dial(rank), "aiocoll control")

    def dials(self, rank: int) -> bool:
        """Whether a link to `rank` is on its way."""
        return rank in self._dialling

    def attached(self, link: Link) -> None:
        """There is a control link now, whoever opened it."""
        for note in self._held.pop(link.peer, ()):
            send_note(link, note)

    async def _dial(self, rank: int) -> None:
        endpoint = self._endpoint
        lost = rank in endpoint.suspected
        try:
            async with asyncio.timeout(REACH if lost else None):
                link = await endpoint.transport.connect(rank, endpoint.cards[rank], ConnKind.CONTROL)
        except (OSError, AiocollError, TimeoutError) as error:
            link = None
            self._held.pop(rank, None)
            endpoint.failure_detector.examine(rank)
            logger.debug("rank %d did not reach rank %d: %s", endpoint.rank, rank, error, extra={"rank": endpoint.rank})
        finally:
            self._dialling.discard(rank)
        if link is not None:
            endpoint.control.attach(link)
        elif rank == endpoint.control.hub:
            endpoint.control.succeed_hub()  # it has become the hub meanwhile
