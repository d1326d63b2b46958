"""Endpoint: the links, control plane, clock and timers of one rank in one job, shared by all its groups."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from aiocoll.engine.channels import Channels
from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.consensus.parts import Parts
from aiocoll.engine.consensus.quorum import is_majority
from aiocoll.engine.control.causes import cause_of, error_from
from aiocoll.engine.control.messages import PROTOCOL, ControlMessage, JobFacts
from aiocoll.engine.control.peer_links import PeerLinks
from aiocoll.engine.control.shapes import fit_text
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.failure.deadlines import Deadlines
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.refusal import LINGER, DiscardingSink, Refusals
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.groups import Groups
from aiocoll.engine.job.context import Context
from aiocoll.engine.job.ids import group_id
from aiocoll.engine.operations.scratch import Scratch
from aiocoll.engine.polling import Polling
from aiocoll.engine.receiver import Receiver
from aiocoll.errors import AiocollError
from aiocoll.loop_end import LoopEnd
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Card, Link, Transport
from aiocoll.transport.byte_stream import ByteStream

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Endpoint"]


class Endpoint:
    """The connections, timers and failure detection of one rank in one job, shared by all its groups.

    Args:
        runtime: clock, timers and loop.
        transport: opens links to peers; already listening.
        rank: this rank in the job.
        world_size: number of ranks in the job.
        spin: seconds an await may poll before it suspends; 0 if a peer shares this process.
        crowded: whether this host has more ranks than cores: then ranks yield the core between polls.
    """

    def __init__(
        self, runtime: Runtime, transport: Transport, rank: int, world_size: int, spin: float, crowded: bool
    ) -> None:
        context = self.context = Context(runtime, transport, rank, world_size)
        self.runtime = runtime
        self.loop = runtime.loop
        self.rank = rank
        self.world_size = world_size
        self.cards: Mapping[int, Card] = {}
        self.quiet = context.quiet
        control = self.control = self._make_control(context)
        registry = self.registry = Groups(context, control)
        self.groups = registry.made
        roster = self.roster = Roster(context, control, self.groups)
        detector = self.failure_detector = FailureDetector(context, control, roster)
        self.direct = PeerLinks(context, control, roster, detector.confirm_death)
        self.polling = Polling(context, self.groups, spin, crowded)
        #: Copied from `polling`, because every await reads this value.
        self.spin = self.polling.spin
        self.turn_is_due = self.polling.turn_is_due
        self.channels = self._make_channels(registry, roster, detector)
        refusals = self._refusals = Refusals(context, control, roster, self.channels.cut, registry.on_rank_end)
        self.attempt = refusals.attempt
        self.watch = Deadlines(runtime, self.groups, detector.check_awaited)
        parts = Parts(context, roster, self.direct, control.send_to_others, detector.check_process, self.groups)
        self.agreements = self._make_agreements(parts)
        #: The memory of this rank that peers read in place (without a copy by this rank).
        self.registered_memory = transport.registered_memory
        self.scratch = Scratch()
        self._closing = False
        facts = JobFacts(rank, world_size, registry.ranks_of)
        receiver = Receiver(facts, control, roster, detector, self.channels, self.agreements, registry, self._refusals)
        control.connect(roster, detector, self.direct, receiver)
        roster.connect(detector.confirm_death, self._ranks_changed, self.channels, is_majority)
        registry.connect(self.agreements.drop_group, self.channels.release)
        self.channels.connect(receiver)
        transport.accepted = self.accept
        transport.heartbeat_accepted = self._accept_heartbeat
        transport.look = self.polling.look
        transport.keep_polling = self.polling.keep_polling

    def _make_control(self, context: Context) -> ControlPlane:
        return ControlPlane(context)

    def _make_channels(self, groups: Groups, roster: Roster, detector: FailureDetector) -> Channels:
        return Channels(self.context, groups, roster, detector, self.polling)

    def _make_agreements(self, parts: Parts) -> Agreements:
        return Agreements(parts, self.registry.record_name)

    @cached_property
    def loop_end(self) -> LoopEnd:
        """The object that closes open groups at the end of the loop. Its owner calls `forget` after the last close."""
        return LoopEnd()

    def set_cards(self, cards: Mapping[int, Card]) -> None:
        """Store the cards of all ranks: the addresses and properties that each rank has published."""
        self.cards = self.context.cards = cards

    async def join(self, cards: Mapping[int, Card]) -> None:
        """Connect to all ranks of the job. On failure, close all links, so that the other ranks notice."""
        self.set_cards(cards)
        try:
            await self.control.join()
            self._start_failure_detector()
        except BaseException:
            self.context.closed = True
            self.failure_detector.stop()
            await self.context.stop_tasks()
            for link in [*self.control.links, *self.polling.links]:
                link.close()
            self._refusals.close()
            raise

    def _start_failure_detector(self) -> None:
        """Start the failure detector. On failure, send the reason to all ranks, which may have joined already."""
        try:
            self.failure_detector.start()
        except AiocollError as error:
            message = {"t": "died", "rank": self.rank, "detail": fit_text(str(error)), "how": "unreachable"}
            self.control.send_to_others(message, range(self.world_size))
            raise

    def _ranks_changed(self) -> None:
        self.registry.closed.end([rank for rank in self.roster.dead if self.roster.is_ignored(rank)])
        self.agreements.on_change()

    # -- groups

    def add(self, group: Communicator) -> None:
        """Add `group`, and deliver the frames and messages that its other ranks have already sent.

        Raises:
            GroupError: another group has the same id.
        """
        early = self.registry.add(group)
        for (rank, _), cause in early.causes.items():
            if (detail := self.registry.own_death(cause)) is not None:
                self.roster.on_own_death(detail, rank)
            group.revoke(error_from(cause), notify=False)
        for rank, message in early.messages:
            self.attempt(rank, group.devices.handle, rank, message)
        for (rank, _), goodbyes in early.goodbyes.items():
            if goodbyes.frames:
                self.attempt(rank, group.on_departure, rank)
        for channel, header, payload in early.frames:
            self.attempt(channel.peer, channel.redeliver, group.deliver, header, payload)
        for rank in group.ranks:
            if rank in self.roster.dead:
                how, detail = self.roster.dead[rank]
                group.lost(rank, detail, how)
            elif rank in self.registry.finished:
                group.on_departure(rank)

    def leave(self, group: Communicator) -> None:
        """Send a goodbye to the ranks of `group`, and remove the group from this endpoint."""
        # The goodbye and the revocation take separate paths. The goodbye may arrive first, so it also carries the
        # cause.
        cause = None if group.cause is None else cause_of(group.cause)
        message = {"t": "bye", "g": group.id, "name": fit_text(group.name), "cause": cause}
        # Peers with a data link must wait for the goodbye on that link, which arrives after all data.
        linked = {channel.peer for channel in group.channels if channel.send_after_data(message)}
        if cause is None:
            # Send the goodbye in the next loop iteration. If this was the last group, this rank ends now, and only the
            # notice of its end is sent. That saves messages when a thousand ranks end together.
            self.runtime.call_soon(self._send_goodbye, message, group.ranks, linked)
        else:
            self._send_goodbye(message, group.ranks, linked)
        roster = self.roster
        gone = {rank for rank in roster.gone if rank not in roster.suspected_ranks}
        # Withdraw before the group is removed: removal may drop its agreements, and a task may be waiting for one of
        # them.
        self.agreements.withdraw(group.id, group.ranks)
        self.registry.remove(group, (rank for rank in group.ranks if rank != self.rank and rank not in gone))
        group.close()

    def _send_goodbye(self, message: ControlMessage, ranks: Sequence[int], linked: set[int]) -> None:
        if not self._closing:
            for rank in ranks:
                if rank != self.rank:
                    self.control.send(rank, {**message, "linked": rank in linked})

    group_id = staticmethod(group_id)

    # -- links

    def accept(self, link: Link) -> None:
        """Start to use a link that a peer has opened, or close the link if this rank has rejected the peer."""
        if self.roster.dead.get(link.peer, ("", ""))[0] == PROTOCOL:
            link.close()
        elif link.kind is ConnKind.CONTROL:
            self.control.attach(link)
        else:
            self.quiet.run(self.channels.attach, link)

    def _accept_heartbeat(self, rank: int, stream: ByteStream) -> None:
        if self.roster.dead.get(rank, ("", ""))[0] == PROTOCOL:
            stream.close()
        else:
            self.failure_detector.attach(rank, stream)

    # -- ending

    async def aclose(self) -> None:
        """Send queued data and goodbyes, and wait at most `LINGER` seconds for the peers to close their sides."""
        if self._closing:
            return
        self._closing = True
        self.agreements.close()
        # If the program is interrupted in one of these steps, stop waiting, but still close everything.
        try:
            await self.control.departure.run()
        finally:
            try:
                await self._end()
            finally:
                self._close()

    def drop(self) -> None:
        """Close everything without a running loop. Peers get a goodbye only if the sockets accept it immediately."""
        if self._closing:
            return
        self._closing = True
        self.agreements.close()
        self.context.closed = True
        if not self.loop.is_closed():
            self._send_end()
        self.watch.close()
        self.failure_detector.stop()
        self._close()

    async def _end(self) -> None:
        context = self.context
        context.closed = True
        self.watch.close()
        self.failure_detector.stop()
        await context.stop_tasks()
        await context.transport.aclose()
        await self._linger(self._send_end())

    def _send_end(self) -> list[Link]:
        """Send goodbyes on all links of this endpoint, and return the links."""
        self.channels.send_on_links({"t": "end", "moved": self.agreements.moved_groups()})
        self.control.departure.send_goodbyes()
        links = self._all_links()
        for link in links:
            link.finish()
        return links

    def _close(self) -> None:
        for link in self._all_links():
            link.close()
        self.context.transport.close()
        self._refusals.close()
        self.channels.close()

    def _all_links(self) -> list[Link]:
        return [*self.channels.links(), *self.control.links]

    async def _linger(self, links: list[Link]) -> None:
        open_links = set(map(id, links))
        ended = self.loop.create_future()

        def lost(link: Link, error: Exception | None) -> None:
            open_links.discard(id(link))
            if not open_links and not ended.done():
                ended.set_result(None)

        for link in links:
            link.sink = DiscardingSink(lost)
        if open_links:
            timer = self.runtime.call_later(LINGER, ended.cancel)
            try:
                await asyncio.wait([ended])
            finally:
                timer.cancel()
