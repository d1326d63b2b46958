"""One rank's end of a job: links, control plane, clock and timer, shared by all groups of this rank on this loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from aiocoll.engine.channel import Channel
from aiocoll.engine.control import Control, Note
from aiocoll.engine.diagnosis import cause_of, error_from
from aiocoll.engine.direct import Direct
from aiocoll.engine.liveness import Liveness
from aiocoll.engine.membership import Membership
from aiocoll.engine.operation import Operation
from aiocoll.engine.polling import Polling
from aiocoll.engine.scratch import Scratch
from aiocoll.engine.shrink import Agreement
from aiocoll.engine.watch import Watch
from aiocoll.errors import AiocollError, PeerLostError
from aiocoll.handshake import ConnKind
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Card, Link, Transport
from aiocoll.transport.frame import Header
from aiocoll.transport.shm.commons import Commons

__all__ = ["Endpoint"]

#: How long a leaving rank waits for its peers to end their side too, in seconds.
LINGER = 1.0
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
        self.groups: dict[int, Membership] = {}
        #: How each lost rank was lost, and what tells so: proven dead ("killed"), or only unreachable or stopped.
        self.dead: dict[int, tuple[str, str]] = {}
        #: Ranks that have ended or are lost: that a connection to one of them breaks tells nothing new.
        self.over: set[int] = set()
        self.closed = self._closing = False
        self.watch = Watch(self)
        self.control = Control(self)
        self.direct = Direct(self)
        self.liveness = Liveness(self)
        #: Context of all engine code: NumPy does not warn in it of what the caller's numbers may hold.
        self.quiet = contextvars.copy_context()
        self.quiet.run(np.seterr, all="ignore")
        #: Memory of this rank that others read where it lies.
        self.commons = Commons(self.loop)
        self._channels: dict[int, Channel] = {}
        self.scratch = Scratch()
        self.polling = Polling(self, spin, crowded)
        #: Of the same: each is part of every await.
        self.spin = self.polling.spin
        self.turn_is_due = self.polling.turn_is_due
        self._tasks: set[asyncio.Task[Any]] = set()
        self._orphans: dict[int, list[tuple[Channel, Header, bytes]]] = {}
        self._doomed: dict[int, dict[str, Any]] = {}
        self._departed: dict[int, set[int]] = {}
        self._gone_groups: set[int] = set()
        self._agreements: dict[int, Agreement] = {}
        transport.accepted = self.accept
        transport.look = self.polling.look
        transport.linger = self.polling.linger

    async def join(self, cards: Mapping[int, Card]) -> None:
        """Meet all ranks; whoever is linked to this one learns at once if that fails."""
        self.cards = cards
        try:
            await self.control.join()
            self.liveness.start(cards)
        except BaseException:
            self.closed = True
            self.liveness.stop()
            await self._stop_tasks()
            for link in [*self.control.links, *self.polling.links]:
                link.close()
            raise

    # -- groups

    def add(self, group: Membership) -> None:
        """Take part in `group`; what its other ranks have said so far is heard now."""
        if group.id in self.groups or group.id in self._gone_groups:
            raise ValueError(
                f"group {group.name!r} would have the id of another group of this rank, by a rare chance: "
                "make it again under another name"
            )
        self.groups[group.id] = group
        if (cause := self._doomed.pop(group.id, None)) is not None:
            group.revoke(error_from(cause), tell=False)
        for rank, note in self.control.early(group.id):
            if rank in group.position:
                group.heard_on_device(group.position[rank], note)
        for rank in self._departed.pop(group.id, ()):
            group.departed(rank)
        for channel, header, payload in self._orphans.pop(group.id, ()):
            if group.frame(channel, header, memoryview(payload)) and header[1]:
                channel.consume(len(payload))
        for rank in group.ranks:
            if rank in self.dead:
                how, detail = self.dead[rank]
                group.lost(rank, detail, how)
            elif self.control.is_gone(rank):
                group.departed(rank)

    def leave(self, group: Membership) -> None:
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
        self._gone_groups.add(group.id)
        group.close()

    def _say_bye(self, note: Note, ranks: Sequence[int], linked: set[int]) -> None:
        if not self._closing:
            for rank in ranks:
                if rank != self.rank:
                    self.control.tell(rank, {**note, "linked": rank in linked})

    def has_left(self, identity: int) -> bool:
        """Whether this rank was in a group and has left it."""
        return identity in self._gone_groups

    def disown(self, identity: int) -> None:
        """Hear nothing of a group that this rank will never be in."""
        self._gone_groups.add(identity)
        self.control.early(identity)
        for channel, header, payload in self._orphans.pop(identity, ()):
            if header[1]:
                channel.consume(len(payload))

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

    def early(self, channel: Channel, header: Header, payload: memoryview | None) -> bool:
        """Keep a frame of a group that this rank has not made yet; True if the group is over instead."""
        if header[3] in self._gone_groups or self.closed:
            return True
        self._orphans.setdefault(header[3], []).append((channel, header, b"" if payload is None else bytes(payload)))
        return False

    def lost(self, peer: int, error: Exception | None) -> None:
        """The data link to `peer` is gone."""
        self._count_links()
        if peer not in self.over:
            self.liveness.broken(peer, f"its connection broke ({error or 'closed without a goodbye'})")
        elif peer not in self.dead:
            self.ended(peer, ())
        if (shared := self.channel(peer).shared) is not None:
            shared.lending.forget()

    def divert(self, operation: Operation) -> None:
        """The memory of `operation` is the caller's again."""
        for channel in operation.group.channels:
            channel.drop(operation)

    def accept(self, link: Link) -> None:
        """Use a link that a peer has opened."""
        if link.kind is ConnKind.CONTROL:
            self.control.attach(link)
        elif link.kind is ConnKind.BEACON:
            self.liveness.attach(link)
        else:
            self.quiet.run(self._attach, self.channel(link.peer), link)

    def _attach(self, channel: Channel, link: Link) -> None:
        channel.attach(link)
        self._count_links()

    def _count_links(self) -> None:
        channels = self._channels.values()
        self.polling.links = tuple(channel.link for channel in channels if channel.link is not None)
        self.polling.boards = tuple(channel.shared.board for channel in channels if channel.shared is not None)

    async def connect(self, rank: int, kind: ConnKind) -> Link | None:
        """Open a link to `rank`, if it has not opened one itself; while its process lives, its loop may be blocked."""
        while True:
            try:
                return await self.transport.connect(rank, self.cards[rank], kind)
            except PeerLostError:
                if rank in self.over or not self.liveness.sees(rank):
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
            self.quiet.run(self._attach, channel, link)

    # -- ranks come and go

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost: every group it belongs to fails, here and, if we are first to know, everywhere.

        Args:
            rank: which one.
            detail: what tells so.
            tell: this rank is the first to know.
            how: "killed" only if a witness has proven it: nothing of that rank is heard any more. "unreachable" and
                "stopped" ranks may come back, and keep their say.
        """
        if self.closed or rank == self.rank:
            return
        self.transport.catch_up()
        known = rank in self.over
        if known and (rank not in self.suspected or how != "killed"):
            return
        self._lose(rank, detail, how)
        if tell:
            self.control.flood({"t": "died", "rank": rank, "detail": detail, "how": how}, range(self.world_size))
        if not known:
            for group in list(self.groups.values()):
                if rank in group.position:
                    group.lost(rank, detail, how)

    def cut_off(self, rank: int) -> None:
        """The connection to a rank broke although its process lives: what both need fails, for the same reason."""
        if self.closed or rank in self.over:
            return
        self.transport.catch_up()
        self._lose(rank, "its connection broke, though its process lives", "unreachable")
        for group in list(self.groups.values()):
            if rank in group.position:
                group.torn(rank)

    def _lose(self, rank: int, detail: str, how: str) -> None:
        self.over.add(rank)
        self.dead[rank] = how, detail
        self.control.gone(rank)
        self.control.miss(rank, detail)
        self.thinned()
        self.liveness.examine(rank)

    def restored(self, rank: int) -> None:
        """A rank that was lost, and not proven dead, is heard again: it can be in new groups."""
        if rank in self.suspected and not self.closed:
            del self.dead[rank]
            self.over.discard(rank)
            self.control.back(rank)
            self.thinned()

    def finished(self, rank: int, moved: Sequence[int]) -> None:
        """A rank has ended in order; it went on elsewhere from the groups `moved`."""
        self.over.add(rank)
        if rank in self.suspected:
            del self.dead[rank]
        for identity in moved:
            if (group := self.groups.get(identity)) is not None:
                self.agreement(identity, group.ranks).moved.add(rank)

    def moved(self) -> list[int]:
        """Return the groups from which this rank has gone on to another."""
        return [identity for identity, agreement in self._agreements.items() if agreement.taken]

    @property
    def suspected(self) -> set[int]:
        """The lost ranks that may still live: stopped ones, and those that cannot be reached."""
        return {rank for rank, (how, _) in self.dead.items() if how != "killed"}

    def departed(self, rank: int, identity: int) -> None:
        """A rank has left a group, and all its data has arrived."""
        if (group := self.groups.get(identity)) is not None:
            group.departed(rank)
        elif identity not in self._gone_groups:
            self._departed.setdefault(identity, set()).add(rank)

    def ended(self, rank: int, linked: Sequence[int]) -> None:
        """A rank has ended, which takes it out of every group, unless it says so behind its data."""
        if self.rank in linked:
            return
        for group in list(self.groups.values()):
            peer = group.position.get(rank)
            if peer is not None and peer not in group.left:
                group.departed(rank)

    def revoked(self, identity: int, cause: dict[str, Any]) -> None:
        """Another rank has revoked a group."""
        self.transport.catch_up()
        if (group := self.groups.get(identity)) is not None:
            group.revoke(error_from(cause), tell=False)
        elif identity not in self._gone_groups:
            self._doomed[identity] = cause

    def agreement(self, identity: int, ranks: Sequence[int]) -> Agreement:
        """Return how the ranks of a group agree on who goes on without the lost ones; it may outlive the group."""
        found = self._agreements.get(identity)
        if found is None:
            found = self._agreements[identity] = Agreement(self, identity, ranks)
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
                for channel in self._channels.values():
                    channel.give_back()
                self.polling.boards = ()

    async def _end(self) -> None:
        self.closed = True
        self.watch.close()
        self.liveness.stop()
        self.commons.close()
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
            link.sink = _Ending(lost)
        if open_links:
            timer = self.runtime.call_later(LINGER, ended.cancel)
            try:
                await asyncio.wait([ended])
            finally:
                timer.cancel()


class _Ending:
    """The sink of a link that is being closed: nothing more is heard."""

    def __init__(self, lost: Callable[[Link, Exception | None], None]) -> None:
        self.lost = lost

    def route(self, link: Link, header: Header) -> memoryview | None:
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        pass

    def drained(self, link: Link) -> None:
        pass
