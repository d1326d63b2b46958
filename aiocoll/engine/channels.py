"""Channels of one rank to its peers. A data link is opened on first use, and replaced when a lost rank returns.

A small group gets its channels, one per rank, when it is made. A large group gets each channel on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.sending import send_message
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.groups import Groups
from aiocoll.engine.job.context import Context
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.polling import Polling
from aiocoll.errors import AiocollError
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Link, SharedMemoryLink

if TYPE_CHECKING:
    from aiocoll.engine.receiver import Receiver

__all__ = ["Channels"]

#: Maximum number of ranks in a group whose channels are all made together with the group. Calls read channels fastest
#: from a plain list. In a larger group, a channel is made on first use: it takes a kilobyte, and a rank in a group of a
#: thousand exchanges data with few other ranks.
FEW = 64


class Channels:
    """The channels of one endpoint to all other ranks of its job.

    Args:
        context: the endpoint's context.
        groups: the endpoint's groups.
        roster: the lost and ended ranks.
        failure_detector: checks ranks whose connection broke.
        polling: polls the links.
    """

    #: The callback for control messages that arrive on data links.
    receive: Callable[[int, memoryview | None, str], None]
    _receiver: Receiver

    def __init__(
        self,
        context: Context,
        groups: Groups,
        roster: Roster,
        failure_detector: FailureDetector,
        polling: Polling,
    ) -> None:
        self._context = context
        self._groups = groups
        self.keep_frame = groups.keep_frame
        self.gone: Container[int] = roster.gone
        self._roster = roster
        self._failure_detector = failure_detector
        self._polling = polling
        self._channels: dict[int, Channel] = {}

    def connect(self, receiver: Receiver) -> None:
        """Set the receiver, which handles the control messages that arrive on data links."""
        self._receiver = receiver
        self.receive = receiver.receive

    def to(self, rank: int) -> Channel:
        """Return the channel to `rank`; make the channel if there is none."""
        channel = self._channels.get(rank)
        if channel is None:
            channel = self._channels[rank] = Channel(self._context, rank, self._groups.made, self)
        return channel

    def for_ranks(self, ranks: Sequence[int]) -> Sequence[Channel]:
        """Return the channels to `ranks`, in order. For a large group, iteration yields only existing channels."""
        return (
            [self.to(rank) for rank in ranks] if len(ranks) <= FEW else _LazyChannels(self, self._context.rank, ranks)
        )

    def made(self, ranks: Sequence[int]) -> Iterator[Channel]:
        """Return the existing channels to `ranks`, in order."""
        return (channel for rank in ranks if (channel := self._channels.get(rank)) is not None)

    def links(self) -> list[Link]:
        """Return the open data links."""
        return [channel.link for channel in self._channels.values() if channel.link is not None]

    def send_on_links(self, message: ControlMessage) -> None:
        """Send a control message on each data link, after all queued data."""
        for channel in self._channels.values():
            channel.send_after_data(message)

    def is_linked(self, rank: int) -> bool:
        """Return whether there is a data link to `rank`."""
        channel = self._channels.get(rank)
        return channel is not None and channel.link is not None

    def notify(self, rank: int, message: ControlMessage) -> None:
        """Send a control message on the data link to `rank`, if there is one."""
        if (channel := self._channels.get(rank)) is not None:
            channel.send_after_data(message)

    # -- opening

    def dial(self, channel: Channel) -> None:
        """Start to open the data link of `channel`, unless the link is being opened already."""
        if not channel.dialling:
            channel.dialling = True
            self._context.spawn(self._dial(channel), f"aiocoll dial {channel.peer}")

    async def _dial(self, channel: Channel) -> None:
        try:
            link = await self._failure_detector.connect(channel.peer, ConnKind.DATA)
        except (OSError, AiocollError) as error:
            channel.dialling = False
            if channel.peer not in self._roster.gone:
                self._roster.record_loss(channel.peer, f"it cannot be reached ({error})", how="unreachable")
            return
        if link is not None:
            self._context.quiet.run(self.attach, link)

    def attach(self, link: Link) -> None:
        """Start to use `link`, a data link that this rank or the peer has opened."""
        channel = self.to(link.peer)
        if (broken := channel.link) is not None:
            # The peer opened a new link because it lost the old one. This rank has not noticed the loss yet.
            broken.close()
            channel.lost(broken, None)
            channel = self._replace_channel(link.peer)
        if (note := self._roster.notice(link.peer)) is not None:
            send_message(link, note)
        channel.attach(link)
        for group in self._groups.made.values():
            group.linked()
        self._count_links()

    # -- ending

    def lost(self, peer: int, error: Exception | None, link: Link) -> None:
        """Handle a data link to `peer` that has closed or has carried an unacceptable message."""
        self._count_links()
        self._groups.closed.end([peer], notes=False)
        self._roster.on_link_closed(peer)
        if self._receiver.refuse(peer, error, link):
            pass
        elif peer not in self._roster.gone:
            self._failure_detector.on_broken_link(peer, f"its connection broke ({error or 'closed without a goodbye'})")
        elif peer not in self._roster.dead:
            self._groups.on_rank_end(peer)
        if (shared := self.to(peer).shared) is not None:
            shared.unmap()

    def on_departure(self, rank: int, group: int) -> None:
        """Record that `rank` has left a group, and so reads no more shared-memory posts of this rank for that group."""
        if (channel := self._channels.get(rank)) is not None and channel.shared is not None:
            channel.shared.on_departure(group)

    def release(self, rank: int, group: int) -> None:
        """Free the data that `rank` has posted in shared memory for a group, which `rank` has left."""
        if (channel := self._channels.get(rank)) is not None:
            channel.purge(group, has_left=True)

    def cut(self, rank: int) -> list[Link]:
        """Stop using the data link to `rank`; return a list with that link, or an empty list if there is no link."""
        channel = self._channels.get(rank)
        found = [] if channel is None else channel.cut()
        self._count_links()
        return found

    def renew(self, rank: int) -> None:
        """Replace the channel to a lost rank that has returned. Messages in the old channel belong to failed groups."""
        channel = self._channels.get(rank)
        if channel is not None and channel.link is None and not channel.dialling:
            self._replace_channel(rank)
            self._count_links()

    def close(self) -> None:
        """Release the shared memory of all peers, after all links have closed."""
        for channel in self._channels.values():
            channel.release_shared()
        self._poll_shared(())

    def _replace_channel(self, rank: int) -> Channel:
        self._channels.pop(rank).release_shared()
        return self.to(rank)

    def _count_links(self) -> None:
        channels = self._channels.values()
        self._polling.links = tuple(channel.link for channel in channels if channel.link is not None)
        self._poll_shared([(channel.peer, channel.shared) for channel in channels if channel.shared is not None])

    def _poll_shared(self, links: Sequence[tuple[int, SharedMemoryLink]]) -> None:
        outboxes = tuple((rank, link.peer_outbox) for rank, link in links)
        self._polling.outboxes = tuple(outbox for _, outbox in outboxes)
        self._polling.stray_posts.outboxes = outboxes
        self._polling.stray_posts.links = tuple(links)


class _LazyChannels(list[Channel]):
    def __init__(self, channels: Channels, rank: int, ranks: Sequence[int]) -> None:
        super().__init__([None] * len(ranks))  # type: ignore[list-item]
        self._channels = channels
        self._ranks = ranks
        channels.to(rank)  # small groups also contain a channel to this rank itself, which never has a link

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if found is None:
            found = self[index] = self._channels.to(self._ranks[index])
        return found

    def __iter__(self) -> Iterator[Channel]:
        # Yield all existing channels, also those that only peers have used: they may hold buffered frames of this
        # group.
        return self._channels.made(self._ranks)
