"""The control plane of an endpoint: a star of eager links to the lowest rank that is there, the hub.

Small msgpack maps: who has left, what has failed, who waits for whom. A message between two ranks that have no link
goes through the hub, which also floods what concerns everybody. A broken control link is how a loss is noticed, so a
rank that ends first makes sure that all know: it tells the hub, which passes it on and answers; the hub itself waits
until every other rank is linked to it, and tells them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from aiocoll.engine.control.messages import CONTROL, ControlMessage
from aiocoll.engine.control.sending import send_message
from aiocoll.engine.job.context import Context
from aiocoll.errors import AiocollError, ProtocolError, RendezvousError
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Link
from aiocoll.transport.frame import FrameKind, Header

__all__ = ["ControlPlane", "Detector", "DirectLinks", "Ranks", "Receiver"]

#: Seconds for which the hub lets others end before it does: ranks that end together are spared a row of new hubs.
PATIENCE = 0.05
#: Seconds after which a rank ends whether or not all others have heard of it.
PARTING = 1.0


class Ranks(Protocol):
    """What is known of the other ranks."""

    @property
    def over(self) -> Container[int]:
        """Ranks that have ended or are lost."""

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost."""

    def cut_off(self, rank: int) -> None:
        """The connection to a rank broke although its process lives."""

    def restored(self, rank: int) -> None:
        """A rank that was lost is heard again."""

    def changed(self) -> None:
        """Ranks are lost or have ended: those that decide with them vote again."""


class Detector(Protocol):
    """What watches the processes of other ranks."""

    async def connect(self, rank: int, kind: ConnKind) -> Link | None:
        """Open a link to `rank`, if it has not opened one itself."""

    def linked(self, link: Link) -> None:
        """There is a control link to its rank."""

    def broken(self, rank: int, detail: str) -> None:
        """A connection to a rank broke."""

    def follow_hub(self) -> None:
        """Another rank may be the hub."""


class DirectLinks(Protocol):
    """What opens control links beside the star."""

    def dials(self, rank: int) -> bool:
        """Whether a link to `rank` is on its way."""

    def attached(self, link: Link) -> None:
        """There is a control link now, whoever opened it."""


class Receiver(Protocol):
    """What carries out control messages."""

    def receive(self, peer: int, payload: memoryview | None, way: str) -> None:
        """Take a message of `peer` that has come on this way."""

    def refuse(self, peer: int, error: Exception | None, link: Link) -> bool:
        """Be done with `peer` if `error` says that what it sent cannot be taken; whether it does."""

    def parting(self) -> ControlMessage:
        """Say which groups this rank has gone on from, and who finds the end behind the data on a link of its own."""


class ControlPlane:
    """The sink of all control links of one rank.

    Args:
        context: of the endpoint.
    """

    _ranks: Ranks
    _detector: Detector
    _direct_links: DirectLinks
    _receiver: Receiver

    def __init__(self, context: Context) -> None:
        self._context = context
        self._links: dict[int, Link] = {}
        self._gone: set[int] = set()
        self._hub = 0
        # As the hub: who has ended in this turn of the loop, is linked to whom, and has gone on from which groups.
        self._ended: list[tuple[int, list[int], list[int]]] = []
        self._dialling: set[int] = set()
        self._backlog: list[tuple[int, ControlMessage]] = []
        self._formed: asyncio.Future[None] = context.loop.create_future()
        self._lost_early: RendezvousError | None = None
        self._parting: asyncio.Future[None] | None = None
        self._patient = True
        self._notified: int | None = None

    def connect(self, ranks: Ranks, detector: Detector, direct_links: DirectLinks, receiver: Receiver) -> None:
        """Have others told what happens to the links, and what is said on them."""
        self._ranks, self._detector, self._direct_links, self._receiver = ranks, detector, direct_links, receiver

    @property
    def links(self) -> list[Link]:
        """The links that are open."""
        return list(self._links.values())

    @property
    def hub(self) -> int:
        """The lowest rank that has neither left nor died."""
        while self._hub in self._gone:
            self._hub += 1
        return self._hub

    def is_gone(self, rank: int) -> bool:
        """Whether `rank` has left or died."""
        return rank in self._gone

    def link(self, rank: int) -> Link | None:
        """Return the control link to `rank`, if there is one."""
        return self._links.get(rank)

    def dials(self, rank: int) -> bool:
        """Whether a link to `rank`, as the next hub, is on its way."""
        return rank in self._dialling

    def linked(self, rank: int) -> bool:
        """Whether there is a link to `rank`, or one on its way, or never will be."""
        return rank in self._links or rank in self._dialling or rank in self._gone

    def absent(self) -> list[int]:
        """Ranks the hub has not seen yet."""
        present = {self._context.rank, *self._links}
        return [rank for rank in range(self._context.world_size) if rank not in present]

    def cut(self, rank: int) -> list[Link]:
        """Use the link to `rank` no more; return it, if there is one."""
        link = self._links.pop(rank, None)
        return [] if link is None else [link]

    async def join(self) -> None:
        """Connect to the hub; return when all ranks have.

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

    def formed(self) -> None:
        """All ranks are linked to the hub, which says so."""
        if not self._formed.done():
            self._formed.set_result(None)

    def attach(self, link: Link) -> None:
        """Use a link that was opened by us or by a peer."""
        broken = self._links.get(link.peer)
        self._links[link.peer] = link
        link.sink = self
        if broken is not None:
            # The peer has none any more, and has not been heard saying so. What is to be said now goes by the new one.
            broken.close()
            self._ranks.cut_off(link.peer)
        link.start()
        enough = len(self._links) >= self._context.world_size - 1
        if enough and not self._formed.done() and self._context.rank == self.hub and not self.absent():
            self._formed.set_result(None)
            for each in self.links:
                send_message(each, {"t": "formed"})
        backlog, self._backlog = self._backlog, []
        for rank, message in backlog:
            self.tell(rank, message)
        self._detector.linked(link)
        self._ranks.restored(link.peer)
        self._direct_links.attached(link)
        self._part()

    # -- saying

    def tell(self, rank: int, message: ControlMessage) -> None:
        """Send `message` to one rank, by the hub if there is no link."""
        link = self._links.get(rank)
        if link is not None:
            send_message(link, message)
        elif rank not in self._gone:
            hub = self.hub
            if hub in self._links:
                send_message(self._links[hub], {"t": "relay", "to": rank, "note": message})
            else:
                self._backlog.append((rank, message))

    def flood(self, message: ControlMessage, ranks: Sequence[int]) -> None:
        """Send `message` to all other `ranks`."""
        for rank in ranks:
            if rank != self._context.rank:
                self.tell(rank, message)

    async def part(self) -> None:
        """Let all other ranks know that this one ends, or will be told by `goodbye`; give up after a while."""
        self._parting = self._context.loop.create_future()
        call_later = self._context.runtime.call_later
        timers = call_later(PATIENCE, self._stop_waiting), call_later(PARTING, self.parted)
        self._part()
        try:
            await self._parting
        finally:
            for timer in timers:
                timer.cancel()

    def goodbye(self) -> None:
        """Tell every peer with a link that this rank ends its side in order."""
        for link in self.links:
            if link.peer != self._notified:
                send_message(link, self._end())

    def _end(self) -> ControlMessage:
        """Say who finds the end behind the data on a link of its own."""
        return {"t": "end", **self._receiver.parting()}

    # -- hearing: the sink of control links

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Control frames are small: they gather in the link."""
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Take a control frame."""
        if header[0] != FrameKind.CONTROL:
            raise ProtocolError(f"rank {link.peer} sent a frame of kind {header[0]} on a control link")
        self._receiver.receive(link.peer, payload, CONTROL)

    def drained(self, link: Link) -> None:
        """Nothing waits for this."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """A control link is gone: its peer has ended, or is lost, or what it sent cannot be taken."""
        peer = link.peer
        if self._links.get(peer) is not link:
            return  # there is another one since
        del self._links[peer]
        if self._receiver.refuse(peer, error, link):
            return
        if peer in self._ranks.over:
            self.gone(peer)
        self._detector.broken(peer, f"its control connection broke ({error or 'closed without a goodbye'})")

    # -- hubs come and go

    def gone(self, rank: int) -> None:
        """The rank is lost or has ended: nothing is sent to it, and the next lowest rank may be the hub now."""
        self.gone_too([rank])

    def back(self, rank: int) -> None:
        """A lost rank can be reached again; it may be the hub."""
        hub = self.hub
        self._gone.discard(rank)
        self._hub = 0
        if self.hub != hub:
            self.succeed_hub()

    def gone_too(self, ranks: Iterable[int]) -> None:
        """These ranks have ended."""
        hub, before = self.hub, len(self._gone)
        self._gone.update(ranks)
        if len(self._gone) > before:
            if hub in self._gone:
                self.succeed_hub()
            self._ranks.changed()
            self._part()

    def miss(self, rank: int, detail: str) -> None:
        """End `join` if it still waits, since the rank has died."""
        if not self._formed.done():
            self._lost_early = RendezvousError(f"rank {rank} was lost while the ranks met: {detail}")
            self._formed.set_result(None)

    def ends(self, peer: int, linked: list[int], moved: list[int]) -> None:
        """A rank that is not the hub tells only the hub, so that one tells the others."""
        was_hub = peer == self.hub
        self.gone(peer)
        if not was_hub:
            if not self._ended:
                self._context.runtime.call_soon(self._pass_on)
            self._ended.append((peer, linked, moved))

    def _pass_on(self) -> None:
        """Tell the others who has ended; where many end in one turn of the loop, most need not be told."""
        ended, self._ended = self._ended, []
        for rank in range(self._context.world_size):
            others = [each for each in ended if each[0] != rank]
            if others:
                self.flood({"t": "ended", "ranks": others}, [rank])
        for rank, _, _ in ended:
            if rank in self._links:
                send_message(self._links[rank], {"t": "known"})

    def _part(self) -> None:
        """Take the next step to the end, if this rank is on its way there."""
        if self._parting is None or self._parting.done():
            return
        size, rank, hub = self._context.world_size, self._context.rank, self.hub
        if len(self._gone) == size - 1:
            self.parted()
        elif rank == hub:
            away = self._gone | {rank}
            if not self._patient and all(each in self._links for each in range(size) if each not in away):
                self.parted()
        elif hub in self._links and self._notified != hub:
            self._notified = hub
            send_message(self._links[hub], self._end())

    def _stop_waiting(self) -> None:
        self._patient = False
        self._part()

    def parted(self) -> None:
        """All that have to know that this rank ends do so."""
        if self._parting is not None and not self._parting.done():
            self._parting.set_result(None)

    def succeed_hub(self) -> None:
        """There is another hub than before: see that there is a link to it."""
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
            # If it was leaving as well, its goodbye has come before that of the last hub.
            self._ranks.died(rank, f"it cannot be reached ({error})", how="unreachable")
        finally:
            self._dialling.discard(rank)

    async def _dial(self, rank: int) -> None:
        link = await self._detector.connect(rank, ConnKind.CONTROL)
        if link is not None:
            self.attach(link)
