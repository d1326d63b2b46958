"""One rank's end of a job: links, control plane, clock and timer, shared by all groups of this rank on this loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from aiocoll.engine.channel import Channel
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.consensus.voter import Voter
from aiocoll.engine.control.causes import cause_of, error_from
from aiocoll.engine.control.messages import PROTOCOL, Facts, Note
from aiocoll.engine.control.peer_links import PeerLinks
from aiocoll.engine.control.refusal import LINGER, Ignored, Refusals
from aiocoll.engine.control.star import ControlPlane, cannot_be_taken
from aiocoll.engine.control.unmade_groups import Early
from aiocoll.engine.failure.deadlines import Deadlines
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.scratch import Scratch
from aiocoll.engine.polling import Polling
from aiocoll.errors import AiocollError, PeerLostError
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Card, Link, Transport
from aiocoll.transport.byte_stream import ByteStream

__all__ = ["Endpoint"]

#: Seconds between two attempts, each of some seconds, to connect to a rank that does not answer but lives.
CONNECT_AGAIN = 0.5


class Endpoint:
    """What this rank has in one job.

    Args:
        runtime: clock, timers and loop.
        transport: how peers are reached; listening already.
        rank: this rank in the job.
        world_size: number of ranks in the job.
        spin: seconds an await may poll before it suspends; 0 where a peer shares this process.
        crowded: more ranks on this host than cores: give the core away between polls.
    """

    def __init__(
        self, runtime: Runtime, transport: Transport, rank: int, world_size: int, spin: float, crowded: bool
    ) -> None:
        self.runtime = runtime
        self.loop = runtime.loop
        self.transport = transport
        self.rank = rank
        self.world_size = world_size
        self.cards: Mapping[int, Card] = {}
        self.groups: dict[int, Communicator] = {}
        roster = self._roster = Roster(self)
        self.dead, self.over = roster.dead, roster.over
        self.died, self.cut_off, self.restored = roster.died, roster.cut_off, roster.restored
        self.finished = roster.finished
        self.closed = self._closing = False
        #: What notes are held against.
        self.facts = Facts(rank, world_size, self.ranks_of)
        #: What peers have said of groups that this rank has not made.
        self.early = Early()
        refusals = self._refusals = Refusals(self)
        self.refuse, self.attempt = refusals.refuse, refusals.attempt
        self.watch = Deadlines(self)
        self.control = ControlPlane(self)
        self.direct = PeerLinks(self)
        self.failure_detector = FailureDetector(self)
        #: Context of all engine code: NumPy does not warn in it of what the caller's numbers may hold.
        self.quiet = contextvars.copy_context()
        self.quiet.run(np.seterr, all="ignore")
        self.registered_memory = transport.registered_memory
        self._channels: dict[int, Channel] = {}
        self.scratch = Scratch()
        self.polling = Polling(self, spin, crowded)
        #: Of the same: each is part of every await.
        self.spin = self.polling.spin
        self.turn_is_due = self.polling.turn_is_due
        self._tasks: set[asyncio.Task[Any]] = set()
        self._agreements: dict[tuple[int, int], Voter] = {}
        transport.accepted = self.accept
        transport.heartbeat_accepted = self._accept_heartbeat
        transport.look = self.polling.look
        transport.linger = self.polling.linger

    async def join(self, cards: Mapping[int, Card]) -> None:
        """Meet all ranks; whoever is linked to this one learns at once if that fails."""
        self.cards = cards
        try:
            await self.control.join()
            self.failure_detector.start(cards)
        except BaseException:
            self.closed = True
            self.failure_detector.stop()
            await self._stop_tasks()
            for link in [*self.control.links, *self.polling.links]:
                link.close()
            self._refusals.close()
            raise

    # -- groups

    def add(self, group: Communicator) -> None:
        """Take part in `group`; what its other ranks have said so far is heard now."""
        if group.id in self.groups or self.early.is_over(group.id):
            raise ValueError(
                f"group {group.name!r} would have the id of another group of this rank, by a rare chance: "
                "make it again under another name"
            )
        self.groups[group.id] = group
        early = self.early.take(group.id)
        if early.cause is not None:
            group.revoke(error_from(early.cause), tell=False)
        for rank, note in early.notes:
            self.attempt(rank, group.hear_on_device, rank, note)
        for rank in early.departed:
            self.attempt(rank, group.departed, rank)
        for channel, header, payload in early.frames:
            self.attempt(channel.peer, channel.hear_again, group.deliver, header, payload)
        for rank in group.ranks:
            if rank in self.dead:
                how, detail = self.dead[rank]
                group.lost(rank, detail, how)
            elif self.control.is_gone(rank):
                group.departed(rank)

    def leave(self, group: Communicator) -> None:
        """Say goodbye to the ranks of `group`."""
        # Between the others, the goodbye may overtake the revocation: it brings the cause along.
        cause = None if group.cause is None else cause_of(group.cause)
        note = {"t": "bye", "g": group.id, "cause": cause}
        linked = set()
        for channel in group.channels:
            if channel.link is not None:
                # That is where to wait for the goodbye: it comes behind all data.
                channel.say(note)
                linked.add(channel.peer)
        if cause is None:
            # Later: if this was the last group, the rank ends, and a thousand ranks that end together say that once.
            self.runtime.call_soon(self._say_bye, note, group.ranks, linked)
        else:
            self._say_bye(note, group.ranks, linked)
        self.groups.pop(group.id, None)
        self.early.end(group.id)
        group.close()

    def _say_bye(self, note: Note, ranks: Sequence[int], linked: set[int]) -> None:
        if not self._closing:
            for rank in ranks:
                if rank != self.rank:
                    self.control.tell(rank, {**note, "linked": rank in linked})

    def ranks_of(self, identity: int) -> Sequence[int] | None:
        """Return the ranks of a group that this rank is in."""
        group = self.groups.get(identity)
        return None if group is None else group.ranks

    def hash62(self, text: str) -> int:
        """Hash `text` to 62 bits, the same on all ranks."""
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2

    # -- links

    def channel(self, rank: int) -> Channel:
        """Return what connects this rank to `rank`."""
        channel = self._channels.get(rank)
        if channel is None:
            channel = self._channels[rank] = Channel(self, rank)
        return channel

    def channels_to(self, ranks: Sequence[int]) -> Iterator[Channel]:
        """Return the channels to `ranks` that there are, in their order."""
        return (channel for rank in ranks if (channel := self._channels.get(rank)) is not None)

    def dial(self, channel: Channel) -> None:
        """Open the data link of `channel`."""
        self.spawn(self._dial(channel), f"aiocoll dial {channel.peer}")

    def spawn(self, coro: Coroutine[Any, Any, None], name: str) -> None:
        """Run a background task of this endpoint."""
        task = self.runtime.create_task(coro, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lost(self, peer: int, error: Exception | None, link: Link) -> None:
        """The data link to `peer` is gone, or what it sent cannot be taken."""
        self._count_links()
        if cannot_be_taken(error):
            self.refuse(peer, error, link)
        elif peer not in self.over:
            self.failure_detector.broken(peer, f"its connection broke ({error or 'closed without a goodbye'})")
        elif peer not in self.dead:
            self.ended(peer, ())
        if (shared := self.channel(peer).shared) is not None:
            shared.unmap()

    def divert(self, operation: Operation) -> None:
        """The memory of `operation` is the caller's again."""
        for channel in operation.comm.channels:
            channel.drop(operation)

    def cut(self, rank: int) -> list[Link]:
        """Use no link to `rank` any more; return those there are."""
        channel = self._channels.get(rank)
        found = self.control.cut(rank) + ([] if channel is None else channel.cut())
        self._count_links()
        return found

    def accept(self, link: Link) -> None:
        """Use a link that a peer has opened; not one of a peer that was refused."""
        if self.dead.get(link.peer, ("", ""))[0] == PROTOCOL:
            link.close()
        elif link.kind is ConnKind.CONTROL:
            self.control.attach(link)
        else:
            self.quiet.run(self._attach, link)

    def _accept_heartbeat(self, rank: int, stream: ByteStream) -> None:
        if self.dead.get(rank, ("", ""))[0] == PROTOCOL:
            stream.close()
        else:
            self.failure_detector.attach(rank, stream)

    def _attach(self, link: Link) -> None:
        channel = self.channel(link.peer)
        if (broken := channel.link) is not None:
            # The peer has none any more, and has not been heard saying so.
            broken.close()
            channel.lost(broken, None)
            channel = self._renewed(link.peer)
        channel.attach(link)
        self._count_links()

    def _renewed(self, rank: int) -> Channel:
        self._channels.pop(rank).give_back()
        return self.channel(rank)

    def _count_links(self) -> None:
        channels = self._channels.values()
        self.polling.links = tuple(channel.link for channel in channels if channel.link is not None)
        self.polling.slot_readers = tuple(
            channel.shared.slot_reader for channel in channels if channel.shared is not None
        )

    async def connect(self, rank: int, kind: ConnKind) -> Link | None:
        """Open a link to `rank`, if it has not opened one itself; while its process lives, its loop may be blocked."""
        while True:
            try:
                return await self.transport.connect(rank, self.cards[rank], kind)
            except PeerLostError:
                if rank in self.over or not self.failure_detector.sees(rank):
                    raise
            await self.runtime.sleep(CONNECT_AGAIN)

    async def _dial(self, channel: Channel) -> None:
        try:
            link = await self.connect(channel.peer, ConnKind.DATA)
        except (OSError, AiocollError) as error:
            channel.dialling = False
            if channel.peer not in self.over:
                self.died(channel.peer, f"it cannot be reached ({error})", how="unreachable")
            return
        if link is not None:
            self.quiet.run(self._attach, link)

    # -- ranks come and go

    @property
    def suspected(self) -> set[int]:
        """The lost ranks that may still live."""
        return self._roster.suspected

    def moved(self) -> list[int]:
        """Return the groups from which this rank has gone on to another."""
        return [identity for (identity, _), agreement in self._agreements.items() if agreement.taken]

    def renew(self, rank: int) -> None:
        """Begin anew with a rank that is back: what was under way belongs to groups that have failed."""
        channel = self._channels.get(rank)
        if channel is not None and channel.link is None and not channel.dialling:
            self._renewed(rank)
            self._count_links()

    def departed(self, rank: int, identity: int) -> None:
        """A rank has left a group, and all its data has arrived."""
        if (group := self.groups.get(identity)) is not None:
            group.departed(rank)
        else:
            self.early.keep_departure(identity, rank)

    def ended(self, rank: int, linked: Sequence[int]) -> None:
        """A rank has ended, which takes it out of every group, unless it says so behind its data."""
        if self.rank in linked:
            return
        for group in list(self.groups.values()):
            peer = group.position.get(rank)
            if peer is not None and peer not in group.left:
                group.departed(rank)

    def revoked(self, rank: int, identity: int, cause: dict[str, Any]) -> None:
        """Another rank has revoked a group."""
        self.transport.catch_up()
        if (group := self.groups.get(identity)) is not None:
            group.revoke(error_from(cause), tell=False)
        else:
            self.early.keep_cause(identity, rank, cause)

    def agreement(self, identity: int, number: int, ranks: Sequence[int], peer: int | None = None) -> Voter:
        """Return how the ranks of a group agree on what comes after it; it may outlive the group.

        Args:
            identity: the group.
            number: how often it has grown before.
            ranks: of the group, as in the job.
            peer: who has spoken of it, if it was not this rank.
        """
        found = self._agreements.get((identity, number))
        if found is None:
            if peer is not None and identity not in self.groups and not self.early.is_over(identity):
                self.early.unmade(identity, peer)
            found = self._agreements[identity, number] = Voter(self, identity, number, ranks)
        return found

    def thinned(self) -> None:
        """A rank was lost, has ended, or is back: agreements take note."""
        for agreement in list(self._agreements.values()):
            agreement.changed()

    # -- ending

    async def aclose(self) -> None:
        """Hand over what is queued, say goodbye, wait for the peers to end too, for at most `LINGER` seconds."""
        if self._closing:
            return
        self._closing = True
        for agreement in self._agreements.values():
            agreement.close()
        # A program that is interrupted in one of these steps waits no longer, but leaves nothing open either.
        try:
            await self.control.part()
        finally:
            try:
                await self._end()
            finally:
                for link in self._all_links():
                    link.close()
                self._refusals.close()
                for channel in self._channels.values():
                    channel.give_back()
                self.polling.slot_readers = ()

    async def _end(self) -> None:
        self.closed = True
        self.watch.close()
        self.failure_detector.stop()
        await self._stop_tasks()
        await self.transport.aclose()
        for channel in self._channels.values():
            channel.say({"t": "end", "moved": self.moved()})
        self.control.goodbye()
        links = self._all_links()
        for link in links:
            link.finish()
        await self._linger(links)

    def _all_links(self) -> list[Link]:
        return [*(channel.link for channel in self._channels.values() if channel.link), *self.control.links]

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _linger(self, links: list[Link]) -> None:
        open_links = set(map(id, links))
        ended = self.loop.create_future()

        def lost(link: Link, error: Exception | None) -> None:
            open_links.discard(id(link))
            if not open_links and not ended.done():
                ended.set_result(None)

        for link in links:
            link.sink = Ignored(lost)
        if open_links:
            timer = self.runtime.call_later(LINGER, ended.cancel)
            try:
                await asyncio.wait([ended])
            finally:
                timer.cancel()
