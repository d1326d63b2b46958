"""Outboxes (shared memory that one rank writes and its peers read) of several ranks in this process."""

from __future__ import annotations

import os
from typing import Any

from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import OutboxLayout
from aiocoll.transport.shm.outbox import Outbox, PeerOutbox
from aiocoll.transport.shm.region import open_readable
from aiocoll.transport.shm.slots import LaneWriter

__all__ = ["STRONG", "Host"]

#: Memory fences that do nothing, since all ranks run in one thread.
STRONG = Fences(None, lambda: None)


class Host:
    """The outboxes of several ranks in this process. Rank 0 posts, and has links to other ranks.

    Attributes:
        boxes: The outboxes by rank.
        lanes: The lanes of rank 0, by reader.
        peer_lanes: The lane of each other rank for rank 0.
        readers: The views of the outbox of rank 0, by reading rank.

    Args:
        ranks: The number of ranks in the layout.
        fences: The fences of this machine.
        linked: The number of ranks that have an outbox; 0 for all.
    """

    def __init__(self, ranks: int = 2, fences: Fences = STRONG, linked: int = 0) -> None:
        self.layout = OutboxLayout(ranks)
        self.fences = fences
        self.boxes = [Outbox(self.layout, fences) for _ in range(linked or ranks)]
        self.lanes: dict[int, LaneWriter] = {}
        self.peer_lanes: dict[int, LaneWriter] = {}
        self.readers: dict[int, PeerOutbox] = {}
        #: Further objects that `close` clears, so that they release the shared memory.
        self.used: list[Any] = []
        for rank in range(1, linked or ranks):
            self.link(rank)

    def link(self, rank: int) -> None:
        """Open the shared-memory link between rank 0 and `rank`."""
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
        self.lanes[rank], self.peer_lanes[rank] = lanes[0], lanes[rank]

    def unlink(self, rank: int) -> None:
        """Close rank 0's end of the link to `rank`, without a notice to `rank`."""
        self.boxes[0].close_lane(self.lanes[rank])

    def close(self) -> None:
        for outbox in self.boxes:
            outbox.close()
        # Clear the objects, since before Python 3.13 each mapping that is still referenced keeps a descriptor open.
        for each in (self, *self.used):
            vars(each).clear()

    def reserved(self) -> int:
        """Return the number of allocated bytes of all outboxes."""
        return sum(os.fstat(box.fd).st_blocks * 512 for box in self.boxes)
