"""Control plane of an endpoint: a star of links from each rank to the hub, the lowest rank that is alive.

It carries small msgpack maps about ranks that left, failures, and stalled operations. Two ranks without a common link
exchange messages through the hub. The hub also broadcasts messages that concern all ranks. A broken control link
reveals a lost rank, so a rank that ends must first notify the others (`aiocoll.engine.control.departure`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aiocoll.engine.control.departure import Departure
from aiocoll.engine.control.messages import CONTROL, ControlMessage
from aiocoll.engine.control.sending import send_message
from aiocoll.engine.job.context import Context
from aiocoll.errors import AiocollError, ProtocolError, RendezvousError
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Link
from aiocoll.transport.frame import FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.control.peer_links import PeerLinks
    from aiocoll.engine.failure.failure_detector import FailureDetector
    from aiocoll.engine.failure.roster import Roster
    from aiocoll.engine.receiver import Receiver

__all__ = ["ControlPlane"]


class ControlPlane:
    """The control links of one rank, and the handler of the frames that arrive on these links.

    Args:
        context: the endpoint's context.

    Attributes:
        departure: the orderly end of this rank.
    """

    _ranks: Roster
    _detector: FailureDetector
    _direct_links: PeerLinks
    _receiver: Receiver

    def __init__(self, context: Context) -> None:
        self._context = context
        self._links: dict[int, Link] = {}
        self._gone: set[int] = set()
        self._hub = 0
        self._dialling: set[int] = set()
        self._backlog: list[tuple[int, ControlMessage]] = []
        self._formed: asyncio.Future[None] = context.loop.create_future()
        self._lost_early: RendezvousError | None = None
        self.departure = Departure(context, self)

    def connect(self, ranks: Roster, detector: FailureDetector, direct_links: PeerLinks, receiver: Receiver) -> None:
        """Set the parts of the endpoint that handle link changes and control messages."""
        self._ranks, self._detector, self._direct_links, self._receiver = ranks, detector, direct_links, receiver
        self.departure.connect(receiver)

    @property
    def links(self) -> list[Link]:
        """Return the open control links."""
        return list(self._links.values())

    @property
    def hub(self) -> int:
        """Return the hub: the lowest rank that has neither ended nor died."""
        while self._hub in self._gone:
            self._hub += 1
        return self._hub

    @property
    def is_alone(self) -> bool:
        """Return whether all other ranks have ended or died."""
        return len(self._gone) == self._context.world_size - 1

    def link(self, rank: int) -> Link | None:
        """Return the control link to `rank`, if there is one."""
        return self._links.get(rank)

    def dials(self, rank: int) -> bool:
        """Return whether this rank is opening a link to `rank`, the next hub."""
        return rank in self._dialling

    def linked(self, rank: int) -> bool:
        """Return whether a link to `rank` exists, is being opened, or is not needed because `rank` has gone."""
        return rank in self._links or rank in self._dialling or rank in self._gone

    def absent(self) -> list[int]:
        """Return the ranks that have not connected to the hub yet."""
        present = {self._context.rank, *self._links}
        return [rank for rank in range(self._context.world_size) if rank not in present]

    def detach(self, rank: int) -> list[Link]:
        """Stop using the link to `rank`; return a list with that link, or an empty list if there is no link."""
        link = self._links.pop(rank, None)
        return [] if link is None else [link]

    async def join(self) -> None:
        """Connect to the hub; return when all ranks have connected.

        Raises:
            RendezvousError: a rank died before that.
            PeerLostError: the hub cannot be reached.
        """
        if self._context.rank != self.hub:
            await self._dial(self.hub)
        elif self._context.world_size == 1:
            return
        await self._formed
        if self._lost_early is not None:
            raise self._lost_early

    def on_formed(self) -> None:
        """Handle the hub's message that all ranks have connected to it."""
        if not self._formed.done():
            self._formed.set_result(None)

    def attach(self, link: Link) -> None:
        """Start to use `link`, a control link that this rank or the peer has opened."""
        broken = self._links.get(link.peer)
        self._links[link.peer] = link
        link.sink = self
        if broken is not None:
            # The peer opened a new link because it lost the old one. This rank has not noticed the loss yet.
            broken.close()
            self._ranks.on_connection_broken(link.peer)
        if (note := self._ranks.notice(link.peer)) is not None:
            send_message(link, note)
        link.start()
        enough = len(self._links) >= self._context.world_size - 1
        if enough and not self._formed.done() and self._context.rank == self.hub and not self.absent():
            self._formed.set_result(None)
            for each in self.links:
                send_message(each, {"t": "formed"})
        backlog, self._backlog = self._backlog, []
        for rank, message in backlog:
            self.send(rank, message)
        self._detector.linked(link)
        self._ranks.record_return(link.peer)
        self._direct_links.on_link_open(link)
        self.departure.advance()

    # -- sending

    def send(self, rank: int, message: ControlMessage) -> None:
        """Send `message` to `rank`: on the control link to `rank`, or through the hub if there is no such link."""
        link = self._links.get(rank)
        if link is not None:
            send_message(link, message)
        elif rank not in self._gone:
            hub = self.hub
            if hub in self._links:
                send_message(self._links[hub], {"t": "relay", "to": rank, "note": message})
            else:
                self._backlog.append((rank, message))

    def send_to_others(self, message: ControlMessage, ranks: Sequence[int]) -> None:
        """Send `message` to each rank in `ranks` except this rank itself."""
        for rank in ranks:
            if rank != self._context.rank:
                self.send(rank, message)

    # -- receiving: the control plane handles the frames of its links

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Return None: control frames are small, so the link buffers them."""
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Handle a frame that has arrived on a control link."""
        if header[0] != FrameKind.CONTROL:
            raise ProtocolError(f"rank {link.peer} sent a frame of kind {header[0]} on a control link")
        self._receiver.receive(link.peer, payload, CONTROL)

    def withdrawn(self, link: Link, header: Header) -> None:
        """Do nothing, because only data frames can be withdrawn."""

    def drained(self, link: Link) -> None:
        """Do nothing, because no code waits until the link can accept more frames."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """Handle a closed control link: its peer has ended, is lost, or sent an unacceptable message."""
        peer = link.peer
        if self._links.get(peer) is not link:
            return  # the link has been replaced by a newer one
        del self._links[peer]
        self._ranks.on_link_closed(peer)
        if self._receiver.refuse(peer, error, link):
            return
        if peer in self._ranks.gone:
            self.remove_rank(peer)
        self._detector.on_broken_link(peer, f"its control connection broke ({error or 'closed without a goodbye'})")

    # -- changes of the hub

    def remove_rank(self, rank: int) -> None:
        """Stop sending to `rank`, which is lost or has ended. If `rank` was the hub, connect to the next hub."""
        self.remove_ranks([rank])

    def restore_rank(self, rank: int) -> None:
        """Handle the return of the lost rank `rank`, which is reachable again. `rank` may become the hub again."""
        hub = self.hub
        self._gone.discard(rank)
        self._hub = 0
        if self.hub != hub:
            self.connect_to_hub()

    def remove_ranks(self, ranks: Iterable[int]) -> None:
        """Handle ranks that have ended. If the hub has ended, connect to the next hub."""
        hub, before = self.hub, len(self._gone)
        self._gone.update(ranks)
        if len(self._gone) > before:
            if hub in self._gone:
                self.connect_to_hub()
            self._ranks.changed()
            self.departure.advance()

    def fail_join(self, rank: int, detail: str) -> None:
        """Fail a waiting `join`, because a rank has died."""
        if not self._formed.done():
            self._lost_early = RendezvousError(f"rank {rank} was lost before all ranks had met: {detail}")
            self._formed.set_result(None)

    def connect_to_hub(self) -> None:
        """Open a link to the hub if there is none, because the hub may have changed."""
        context, hub = self._context, self.hub
        if not context.closed and hub != context.rank:
            if not self.linked(hub) and not self._direct_links.dials(hub):
                self._dialling.add(hub)
                context.spawn(self._redial(hub), "aiocoll control")
            self._detector.follow_hub()

    async def _redial(self, rank: int) -> None:
        try:
            await self._dial(rank)
        except (OSError, AiocollError) as error:
            # The rank is lost, not ended: a rank that ended with the previous hub would have sent its goodbye before.
            self._ranks.record_loss(rank, f"it cannot be reached ({error})", how="unreachable")
        finally:
            self._dialling.discard(rank)

    async def _dial(self, rank: int) -> None:
        link = await self._detector.connect(rank, ConnKind.CONTROL)
        if link is not None:
            self.attach(link)
