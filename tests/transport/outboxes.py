"""Outboxes of several ranks, all in this process."""

from __future__ import annotations

import os
from typing import Any

from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import OutboxLayout
from aiocoll.transport.shm.outbox import Outbox, PeerOutbox
from aiocoll.transport.shm.region import open_readable
from aiocoll.transport.shm.slots import LaneWriter

__all__ = ["STRONG", "Host"]

#: As of x86-64, in one thread.
STRONG = Fences(None, lambda: None)


class Host:
    """The outboxes of some ranks of this process; rank 0 posts, and is linked with some others.

    Attributes:
        boxes: by rank.
        lanes: of rank 0, by reader.
        theirs: of each other rank, for rank 0.
        readers: of rank 0's outbox, by rank.

    Args:
        ranks: that the layout is for.
        fences: of this machine.
        linked: how many of them there are; 0 for all.
    """

    def __init__(self, ranks: int = 2, fences: Fences = STRONG, linked: int = 0) -> None:
        self.layout = OutboxLayout(ranks)
        self.fences = fences
        self.boxes = [Outbox(self.layout, fences) for _ in range(linked or ranks)]
        self.lanes: dict[int, LaneWriter] = {}
        self.theirs: dict[int, LaneWriter] = {}
        self.readers: dict[int, PeerOutbox] = {}
        #: Further objects that let go of the memory with this one.
        self.used: list[Any] = []
        for rank in range(1, linked or ranks):
            self.link(rank)

    def link(self, rank: int) -> None:
        """Open a link between rank 0 and another one."""
        pair = (0, rank), (rank, 0)
        lanes: dict[int, LaneWriter] = {}
        for me, peer in pair:
            lane = self.boxes[me].open_lane(peer)
            assert lane is not None
            lanes[me] = lane
        for me, peer in pair:
            memory = open_readable(os.dup(self.boxes[peer].fd), self.layout.nbytes)
            outbox = PeerOutbox(memory, self.layout, lanes[peer].number, lanes[me], peer, self.fences)
            lanes[me].connect(outbox.words)
            if me:
                self.readers[me] = outbox
        self.lanes[rank], self.theirs[rank] = lanes[0], lanes[rank]

    def unlink(self, rank: int) -> None:
        """Rank 0 ends its link to another one, which may not notice."""
        self.boxes[0].close_lane(self.lanes[rank])

    def close(self) -> None:
        for outbox in self.boxes:
            outbox.close()
        # Until Python 3.13 a mapping has a descriptor of its own: whoever keeps this object keeps no memory.
        for each in (self, *self.used):
            vars(each).clear()

    def reserved(self) -> int:
        """Return the bytes of memory that the outboxes have."""
        return sum(os.fstat(box.fd).st_blocks * 512 for box in self.boxes)
