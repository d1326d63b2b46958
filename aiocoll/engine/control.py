"""The control plane of an endpoint: a star of eager links to the lowest rank that is there, the hub.

Small msgpack maps: who has left, what has failed, who waits for whom. A message between two ranks that have no link
goes through the hub; what concerns everybody is flooded by it. A broken control link is how a loss is noticed, so a
rank that ends first makes sure that all others know: it tells the hub, which passes it on and answers; the hub itself
waits until every other rank is linked to it, and tells them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from aiocoll.engine.lineage import stranger
from aiocoll.errors import AiocollError, ProtocolError, RendezvousError
from aiocoll.handshake import ConnKind
from aiocoll.transport.base import Link
from aiocoll.transport.frame import HEADER, FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["DEVICE", "UNREADABLE", "Control", "Note", "frame_of", "send_note"]

Note = dict[str, Any]

#: The kind of notes about CUDA devices.
DEVICE = "device"

#: What a note raises that makes no sense.
UNREADABLE = (ValueError, KeyError, TypeError)

#: Seconds for which the hub lets others end before it does: ranks that end together are spared a row of new hubs.
PATIENCE = 0.05
#: Seconds after which a rank ends whether or not all others have heard of it.
PARTING = 1.0


class Control:
    """The sink of all control links of one rank."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._links: dict[int, Link] = {}
        self._gone: set[int] = set()
        self._hub = 0
        # As the hub: who has ended in this turn of the loop, is linked to whom, and has gone on from which groups.
        self._ended: list[tuple[int, list[int], list[int]]] = []
        self._dialling: set[int] = set()
        self._backlog: list[tuple[int, Note]] = []
        self._formed: asyncio.Future[None] = endpoint.loop.create_future()
        self._lost_early: RendezvousError | None = None
        self._parting: asyncio.Future[None] | None = None
        self._patient = True
        self._told: int | None = None
        #: Notes about CUDA devices for groups that this rank has not made yet, and whose they are.
        self._early: dict[int, list[tuple[int, Note]]] = {}

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

    def linked(self, rank: int) -> bool:
        """Whether there is a link to `rank`, or one on its way, or never will be."""
        return rank in self._links or rank in self._dialling or rank in self._gone

    def absent(self) -> list[int]:
        """Ranks the hub has not seen yet."""
        present = {self._endpoint.rank, *self._links}
        return [rank for rank in range(self._endpoint.world_size) if rank not in present]

    async def join(self) -> None:
        """Connect to the hub; return when all ranks have.

        Raises:
            RendezvousError: a rank died before that.
            PeerLostError: the hub cannot be reached.
        """
        endpoint = self._endpoint
        if endpoint.rank != self.hub:
            await self._dial(self.hub)
        elif endpoint.world_size == 1:
            return
        await self._formed
        if self._lost_early is not None:
            raise self._lost_early

    def attach(self, link: Link) -> None:
        """Use a link that was opened by us or by a peer."""
        if (broken := self._links.pop(link.peer, None)) is not None:
            # The peer has none any more, and has not been heard saying so.
            broken.close()
            self._endpoint.cut_off(link.peer)
        self._links[link.peer] = link
        link.sink = self
        link.start()
        enough = len(self._links) >= self._endpoint.world_size - 1
        if enough and not self._formed.done() and self._endpoint.rank == self.hub and not self.absent():
            self._formed.set_result(None)
            for each in self.links:
                send_note(each, {"t": "formed"})
        backlog, self._backlog = self._backlog, []
        for rank, note in backlog:
            self.tell(rank, note)
        self._endpoint.liveness.linked(link)
        self._endpoint.restored(link.peer)
        self._endpoint.direct.attached(link)
        self._part()

    # -- saying

    def tell(self, rank: int, note: Note) -> None:
        """Send `note` to one rank, by the hub if there is no link."""
        link = self._links.get(rank)
        if link is not None:
            send_note(link, note)
        elif rank not in self._gone:
            hub = self.hub
            if hub in self._links:
                send_note(self._links[hub], {"t": "relay", "to": rank, "note": note})
            else:
                self._backlog.append((rank, note))

    def flood(self, note: Note, ranks: Sequence[int]) -> None:
        """Send `note` to all other `ranks`."""
        for rank in ranks:
            if rank != self._endpoint.rank:
                self.tell(rank, note)

    async def part(self) -> None:
        """Let all other ranks know that this one ends, or will be told by `goodbye`; give up after a while."""
        self._parting = self._endpoint.loop.create_future()
        call_later = self._endpoint.runtime.call_later
        timers = call_later(PATIENCE, self._lose_patience), call_later(PARTING, self._parted)
        self._part()
        try:
            await self._parting
        finally:
            for timer in timers:
                timer.cancel()

    def goodbye(self) -> None:
        """Tell every peer with a link that this rank ends its side in order."""
        for link in self.links:
            if link.peer != self._told:
                send_note(link, self._end())

    def _end(self) -> Note:
        """Say who finds the end behind the data on a link of its own."""
        endpoint = self._endpoint
        return {"t": "end", "linked": [link.peer for link in endpoint.polling.links], "moved": endpoint.moved()}

    # -- hearing: the sink of control links

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Control frames are small: they gather in the link."""
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Take a control frame."""
        self.heard(link.peer, payload, direct=False)

    def drained(self, link: Link) -> None:
        """Nothing waits for this: control messages are written without looking back."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """A control link is gone: its peer has ended in order, has died, or cannot be reached."""
        peer = link.peer
        if self._links.get(peer) is not link:
            return  # there is another one since
        del self._links[peer]
        if peer in self._endpoint.over:
            self.gone(peer)
        self._endpoint.liveness.broken(peer, f"its control connection broke ({error or 'closed without a goodbye'})")

    def heard(self, peer: int, payload: memoryview | None, direct: bool) -> None:
        """Take a note from `peer`; `direct` if it came on the data link, behind all data."""
        try:
            note = msgpack.unpackb(payload or b"")
            self._handle(peer, note, direct)
        except UNREADABLE as error:
            raise ProtocolError(f"rank {peer} sent a control message that cannot be read: {error!r}") from error

    def _handle(self, peer: int, note: Note, direct: bool) -> None:
        endpoint = self._endpoint
        kind = note["t"]
        if kind == "relay":
            if note["to"] != endpoint.rank:
                self.tell(note["to"], {"t": "relayed", "from": peer, "note": note["note"]})
        elif kind == "relayed":
            self._handle(note["from"], note["note"], direct)
        elif kind == "formed":
            if not self._formed.done():
                self._formed.set_result(None)
        elif kind == "end":
            endpoint.finished(peer, note["moved"])
            if not direct:
                self._heard_end(peer, note["linked"], note["moved"])
            endpoint.ended(peer, () if direct else note["linked"])
        elif kind == "ended":
            for rank, _, moved in note["ranks"]:
                endpoint.finished(rank, moved)
            self._gone_too([rank for rank, _, _ in note["ranks"]])
            for rank, linked, _ in note["ranks"]:
                endpoint.ended(rank, linked)
        elif kind == "known":
            self._parted()
        elif kind == "bye":
            if note["cause"] is not None:
                endpoint.revoked(note["g"], note["cause"])
            if direct or not note["linked"]:
                endpoint.departed(peer, note["g"])
        elif kind == "died":
            endpoint.died(note["rank"], note["detail"], tell=False, how=note["how"])
        elif kind == "probe":
            self.tell(peer, {"t": "alive"})
        elif kind == "alive":
            endpoint.restored(peer)
        elif kind == "waits":
            endpoint.liveness.needed()
        elif kind == "revoke":
            endpoint.revoked(note["g"], note["cause"])
        elif kind == DEVICE:
            if (group := endpoint.groups.get(note["g"])) is not None:
                group.heard_on_device(group.position[peer], note)
            elif not endpoint.has_left(note["g"]):
                self._early.setdefault(note["g"], []).append((peer, note))
        elif kind == "shrink":
            endpoint.agreement(note["g"], note["ranks"]).heard(peer, note)
        elif (group := endpoint.groups.get(note["g"])) is not None:
            group.diagnosis.heard(group.position[peer], note)
        elif (last := stranger(endpoint, peer, note)) is not None and kind == "query":
            self.tell(peer, {"t": "absent", "g": note["g"], "op": note["op"], "last": last, "age": None, "asked": True})

    def early(self, identity: int) -> list[tuple[int, Note]]:
        """Take the notes about CUDA devices that came for a group before this rank had made it, and whose they are."""
        return self._early.pop(identity, [])

    # -- hubs come and go

    def gone(self, rank: int) -> None:
        """The rank is lost or has ended: nothing is sent to it, and the next lowest rank may be the hub now."""
        self._gone_too([rank])

    def back(self, rank: int) -> None:
        """A lost rank can be reached again; it may be the hub."""
        hub = self.hub
        self._gone.discard(rank)
        self._hub = 0
        if self.hub != hub:
            self.succeed_hub()

    def _gone_too(self, ranks: Iterable[int]) -> None:
        hub, before = self.hub, len(self._gone)
        self._gone.update(ranks)
        if len(self._gone) > before:
            if hub in self._gone:
                self.succeed_hub()
            self._endpoint.thinned()
            self._part()

    def miss(self, rank: int, detail: str) -> None:
        """End `join` if it still waits, since the rank has died."""
        if not self._formed.done():
            self._lost_early = RendezvousError(f"rank {rank} was lost while the ranks met: {detail}")
            self._formed.set_result(None)

    def _heard_end(self, peer: int, linked: list[int], moved: list[int]) -> None:
        """A rank that is not the hub tells only the hub, so that one tells the others."""
        was_hub = peer == self.hub
        self.gone(peer)
        if not was_hub:
            if not self._ended:
                self._endpoint.runtime.call_soon(self._pass_on)
            self._ended.append((peer, linked, moved))

    def _pass_on(self) -> None:
        """Tell the others who has ended; where many end in one turn of the loop, most need not be told."""
        ended, self._ended = self._ended, []
        self.flood({"t": "ended", "ranks": ended}, range(self._endpoint.world_size))
        for rank, _, _ in ended:
            if rank in self._links:
                send_note(self._links[rank], {"t": "known"})

    def _part(self) -> None:
        """Take the next step to the end, if this rank is on its way there."""
        if self._parting is None or self._parting.done():
            return
        size, rank, hub = self._endpoint.world_size, self._endpoint.rank, self.hub
        if len(self._gone) == size - 1:
            self._parted()
        elif rank == hub:
            away = self._gone | {rank}
            if not self._patient and all(each in self._links for each in range(size) if each not in away):
                self._parted()
        elif hub in self._links and self._told != hub:
            self._told = hub
            send_note(self._links[hub], self._end())

    def _lose_patience(self) -> None:
        self._patient = False
        self._part()

    def _parted(self) -> None:
        if self._parting is not None and not self._parting.done():
            self._parting.set_result(None)

    def succeed_hub(self) -> None:
        """There is another hub than before: see that there is a link to it."""
        endpoint = self._endpoint
        hub = self.hub
        if not endpoint.closed and hub != endpoint.rank:
            if not self.linked(hub) and not endpoint.direct.dials(hub):
                self._dialling.add(hub)
                endpoint.spawn(self._redial(hub), "aiocoll control")
            endpoint.liveness.follow_hub()

    async def _redial(self, rank: int) -> None:
        try:
            await self._dial(rank)
        except (OSError, AiocollError) as error:
            # If it was leaving as well, its goodbye has come before that of the last hub.
            self._endpoint.died(rank, f"it cannot be reached ({error})", how="unreachable")
        finally:
            self._dialling.discard(rank)

    async def _dial(self, rank: int) -> None:
        link = await self._endpoint.connect(rank, ConnKind.CONTROL)
        if link is not None:
            self.attach(link)


def send_note(link: Link, note: Note) -> None:
    """Send a control message on any link."""
    link.write(*frame_of(note))


def frame_of(note: Note) -> tuple[bytes, memoryview]:
    """Return header and payload of a control message."""
    body: bytes = msgpack.packb(note)
    return HEADER.pack(FrameKind.CONTROL, 0, 0, 0, 0, 0, 0, len(body), len(body)), memoryview(body)
