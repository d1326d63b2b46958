"""The control plane of an endpoint: a star of eager links to the lowest rank that is there, the hub.

Small msgpack maps: who has left, what has failed, who waits for whom. A message between two ranks that have no link
goes through the hub, which also floods what concerns everybody. A broken control link is how a loss is noticed, so a
rank that ends first makes sure that all know: it tells the hub, which passes it on and answers; the hub itself waits
until every other rank is linked to it, and tells them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

from aiocoll.engine.control import messages as notes
from aiocoll.engine.control.messages import DEVICE, PROTOCOL, Note
from aiocoll.engine.control.sending import send_note
from aiocoll.engine.split_history import stranger
from aiocoll.errors import AiocollError, ProtocolError, RendezvousError
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Link
from aiocoll.transport.frame import FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["ControlPlane", "cannot_be_taken"]

#: Seconds for which the hub lets others end before it does: ranks that end together are spared a row of new hubs.
PATIENCE = 0.05
#: Seconds after which a rank ends whether or not all others have heard of it.
PARTING = 1.0


class ControlPlane:
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
        present = {self._endpoint.rank, *self._links}
        return [rank for rank in range(self._endpoint.world_size) if rank not in present]

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
        broken = self._links.get(link.peer)
        self._links[link.peer] = link
        link.sink = self
        if broken is not None:
            # The peer has none any more, and has not been heard saying so. What is to be said now goes by the new one.
            broken.close()
            self._endpoint.cut_off(link.peer)
        link.start()
        enough = len(self._links) >= self._endpoint.world_size - 1
        if enough and not self._formed.done() and self._endpoint.rank == self.hub and not self.absent():
            self._formed.set_result(None)
            for each in self.links:
                send_note(each, {"t": "formed"})
        backlog, self._backlog = self._backlog, []
        for rank, note in backlog:
            self.tell(rank, note)
        self._endpoint.failure_detector.linked(link)
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
        return {"t": "end", "linked": sorted(link.peer for link in endpoint.polling.links), "moved": endpoint.moved()}

    # -- hearing: the sink of control links

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Control frames are small: they gather in the link."""
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Take a control frame."""
        if header[0] != FrameKind.CONTROL:
            raise ProtocolError(f"rank {link.peer} sent a frame of kind {header[0]} on a control link")
        self.heard(link.peer, payload, notes.CONTROL)

    def drained(self, link: Link) -> None:
        """Nothing waits for this."""

    def lost(self, link: Link, error: Exception | None) -> None:
        """A control link is gone: its peer has ended, or is lost, or what it sent cannot be taken."""
        endpoint, peer = self._endpoint, link.peer
        if self._links.get(peer) is not link:
            return  # there is another one since
        del self._links[peer]
        if cannot_be_taken(error):
            endpoint.refuse(peer, error, link)
            return
        if peer in endpoint.over:
            self.gone(peer)
        endpoint.failure_detector.broken(peer, f"its control connection broke ({error or 'closed without a goodbye'})")

    def heard(self, peer: int, payload: memoryview | None, way: str) -> None:
        """Take a note of `peer` that has come on this way.

        Raises:
            ProtocolError: it does not fit, or an exception was raised by what it says.
        """
        note = notes.read(payload or b"", peer, way, self._endpoint.facts)
        self._carry_out(peer, note, way == notes.DATA)

    def _carry_out(self, peer: int, note: Note, direct: bool) -> None:
        try:
            self._handle(peer, note, direct)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"rank {self._endpoint.rank} could not take the control message {note['t']!r} of rank {peer}: {error!r}"
            ) from error

    def _handle(self, peer: int, note: Note, direct: bool) -> None:
        """Do what a note says, which came behind all data if `direct`."""
        endpoint = self._endpoint
        kind = note["t"]
        if kind == "relay":
            self.tell(note["to"], {"t": "relayed", "from": peer, "note": note["note"]})
        elif kind == "relayed":
            self._heard_passed_on(note["from"], note["note"])
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
                endpoint.revoked(peer, note["g"], note["cause"])
            if direct or not note["linked"]:
                endpoint.departed(peer, note["g"])
        elif kind == "died":
            self._heard_died(peer, note)
        elif kind == "probe":
            self.tell(peer, {"t": "alive"})
        elif kind == "alive":
            endpoint.restored(peer)
        elif kind == "waits":
            endpoint.failure_detector.needed()
        elif kind == "revoke":
            endpoint.revoked(peer, note["g"], note["cause"])
        elif kind == "shrink":
            endpoint.agreement(note["g"], note["n"], note["ranks"], peer).heard(peer, note)
        else:
            self._of_group(peer, note)

    def _of_group(self, peer: int, note: Note) -> None:
        """Hand a note about a device or an operation to its group."""
        endpoint, identity = self._endpoint, note["g"]
        group = endpoint.groups.get(identity)
        if group is not None and note["t"] == DEVICE:
            group.hear_on_device(peer, note)
        elif group is not None:
            group.stalls.heard(group.position[peer], note)
        elif note["t"] == DEVICE:
            endpoint.early.keep_note(identity, peer, note)
        elif (last := stranger(endpoint, peer, note)) is not None and note["t"] == "query":
            self.tell(peer, {"t": "absent", "g": identity, "op": note["op"], "last": last, "age": None, "asked": True})

    def _heard_passed_on(self, origin: int, note: Note) -> None:
        """Take what another rank has said; if it cannot be taken, that is not the fault of the one between."""
        try:
            self._carry_out(origin, note, direct=False)
        except ProtocolError as error:
            self._endpoint.refuse(origin, error)

    def _heard_died(self, peer: int, note: Note) -> None:
        endpoint, rank, how = self._endpoint, note["rank"], note["how"]
        if rank != endpoint.rank:
            endpoint.died(rank, note["detail"], tell=False, how=how)
        elif how == PROTOCOL:
            endpoint.died(peer, note["detail"], tell=False, how=how)

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
        for rank in range(self._endpoint.world_size):
            others = [each for each in ended if each[0] != rank]
            if others:
                self.flood({"t": "ended", "ranks": others}, [rank])
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
            endpoint.failure_detector.follow_hub()

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


def cannot_be_taken(error: Exception | None) -> TypeGuard[Exception]:
    """Whether a link has ended because of what the peer sent, or because of what taking it raised here."""
    return error is not None and not isinstance(error, OSError)
