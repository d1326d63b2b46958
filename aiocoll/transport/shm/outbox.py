"""Outbox of a rank: memory that only this rank writes, and that its peers map read-only.

    rank 0's outbox                                            rank 1's outbox
    common lane: slots, posted once for all their readers      common lane
    lane for 1:  posts, named, slots that rank 1 reads         lane for 0
                 consumed: numbers of rank 1's posts that rank 0 has read

A peer receives the outbox's descriptor when the link to it opens (`dial`), so no rank waits for the memory of
another. The schedule decides which of the two lanes carries a contribution, so both ends know it
(`aiocoll.algorithms.select`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from aiocoll.errors import ProtocolError
from aiocoll.native import core
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import (
    CHUNKED,
    COMMON_CONSUMED,
    COMMON_NAMED,
    LANE_CONSUMED,
    LANE_NAMED,
    POSTS,
    SLOTS,
    OutboxLayout,
)
from aiocoll.transport.shm.region import OwnRegion, no_memory_error
from aiocoll.transport.shm.slots import CommonWriter, LaneWriter, SlotReader

__all__ = ["Outbox", "PeerOutbox"]


class Outbox:
    """The outbox of this rank, in which it posts data for its peers.

    Args:
        layout: the layout for the ranks of this job.
        fences: the memory fences of this machine.

    Attributes:
        status: the words of the doorbell.
        common: the common lane, which several peers read.

    Raises:
        OSError: no memory or descriptor is left, or the kernel forbids shared memory.
    """

    __slots__ = ("_fences", "_lanes", "_open", "_region", "common", "layout", "status")

    def __init__(self, layout: OutboxLayout, fences: Fences) -> None:
        self.layout = layout
        self._fences = fences
        self._region = region = OwnRegion(layout.nbytes, (0, layout.common.small))
        self.status = memoryview(region.memory)[: layout.common.lines].cast("Q")
        self.common = CommonWriter(region, (0, layout.common.end), layout.common, fences)
        # All lanes ever opened, by number, and the numbers of lanes in use.
        self._lanes: dict[int, LaneWriter] = {}
        self._open: set[int] = set()

    @property
    def fd(self) -> int:
        """Return the file descriptor of the outbox's memory."""
        return self._region.fd

    def open_lane(self, peer: int) -> LaneWriter | None:
        """Reserve a lane for a link to a peer, until `close_lane`. Return None if too many links are opened at once.

        Raises:
            OSError: no memory is left.
        """
        layout = self.layout
        # Prefer the lane with the peer's number, unless another link uses it.
        number = next((each for each in (peer, *range(layout.ranks, layout.lanes)) if each not in self._open), None)
        if number is None:
            return None
        lane = self._lanes.get(number)
        if lane is None:
            lane = LaneWriter(self._region, number, layout.lane_span(number), layout.lane, self._fences)
            self._lanes[number] = lane
        self.common.withdraw(lane)
        if not lane.reset():
            raise no_memory_error()
        self._open.add(number)
        return lane

    def close_lane(self, lane: LaneWriter) -> None:
        """Release the lane of a link that has ended or was never opened. Its posts can still be read."""
        lane.disconnect()
        self._open.discard(lane.number)

    def close(self) -> None:
        """Close the descriptor and release this object's views. The memory is unmapped with its last view."""
        self.status.release()
        for lane in self._lanes.values():
            lane.forget()
        self._lanes.clear()
        self._region.close()
        if self.common.native is not None:
            self.common.native.close()
        self.common.forget()
        del self.common


class PeerOutbox:
    """A peer's outbox, which this rank maps read-only.

    Args:
        memory: the whole outbox.
        layout: its layout.
        number: the number of its lane for this rank.
        lane: this rank's lane for the peer.
        peer: the rank of the peer.
        fences: the memory fences of this machine.

    Raises:
        ProtocolError: the outbox has no lane of this number.

    Attributes:
        status: the words of the peer's doorbell.
        words: the words of the peer's lane for this rank.
        common: the slots of the common lane.
        lane: the slots of the lane for this rank.
    """

    __slots__ = ("_chunked", "_layout", "_memory", "_order", "_seen", "_start", "common", "lane", "status", "words")

    def __init__(
        self, memory: mmap.mmap, layout: OutboxLayout, number: int, lane: LaneWriter, peer: int, fences: Fences
    ) -> None:
        if number >= layout.lanes:
            raise ProtocolError(f"rank {peer} offered lane {number} of an outbox of {layout.lanes} lanes")
        whole, (start, end) = memoryview(memory), layout.lane_span(number)
        self._memory, self._start, self._layout = whole, start, layout
        self.status = whole[: layout.common.lines].cast("Q")
        self.words = words = whole[start : start + layout.lane.lines].cast("Q")
        self.common = SlotReader(
            whole[: layout.common.end],
            layout.common,
            words[COMMON_NAMED : COMMON_NAMED + SLOTS],
            lane.words[COMMON_CONSUMED : COMMON_CONSUMED + SLOTS],
            fences,
            peer,
        )
        self.lane = SlotReader(
            whole[start:end],
            layout.lane,
            words[LANE_NAMED : LANE_NAMED + SLOTS],
            lane.words[LANE_CONSUMED : LANE_CONSUMED + SLOTS],
            fences,
            peer,
        )
        self._order = fences.order
        self._seen = self._chunked = 0

    def native_lanes(
        self, own: Outbox, lane: LaneWriter, eventfd: int, poll_soon: Callable[[], None]
    ) -> core.PeerLanes | None:
        """Return the accelerator's view of the lanes in both directions; None without the accelerator.

        Args:
            own: this rank's outbox.
            lane: this rank's lane for the peer.
            eventfd: the eventfd of the peer's doorbell.
            poll_soon: the method of this rank's doorbell that makes this rank poll.
        """
        if core is None:
            return None
        layout = self._layout
        own_side = lane.memory, tuple(own.layout.lane), lane.posted, lane.ready
        peer_side = self._memory, self._start, tuple(layout.common), tuple(layout.lane)
        return core.PeerLanes(
            *own_side, *peer_side, own.status, lane.reserve, poll_soon, lane, own.common.native, eventfd
        )

    def has_news(self) -> bool:
        """Return whether, since the last call, the peer has posted data or written the last chunk of an operation."""
        words = self.words
        posts, chunked = words[POSTS], words[CHUNKED]
        if posts == self._seen and chunked == self._chunked:
            return False
        self._seen, self._chunked = posts, chunked
        # The caller reads the posts next. The fence ensures that the processor loads posts after their count.
        if self._order is not None:
            self._order()
        return True

    def unread(self) -> list[tuple[int, int, int]]:
        """Return the operation, group and fingerprint of each unread post for an open group."""
        return self.common.unread() + self.lane.unread()

    def purge(self, group: int) -> None:
        """Mark all posts for a closed group as consumed, because no operation will read them."""
        self.common.purge(group)
        self.lane.purge(group)

    def release(self, group: int) -> None:
        """Forget a closed group for which the peer posts no more data."""
        self.common.release(group)
        self.lane.release(group)

    def detach(self) -> None:
        """Release the lane of an ended link, so that another link may use it. The peer's posts can still be read."""
        self.common.detach()
        self.lane.detach()

    def close(self) -> None:
        """Release this object's views. The memory is unmapped with its last view."""
        self.common.forget()
        self.lane.forget()
        del self.common, self.lane, self.status, self.words, self._memory
