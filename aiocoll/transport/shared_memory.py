"""Links through memory that both ends map, and memory that peers read in place: words, sizes, and what they share.

A rank has an **outbox**, whose **slots** get its contributions to small operations: in the **common lane** what several
peers read, in the **lane** of a peer what only that one reads. A link has in each direction a **chunk queue**, which
carries the chunks of one large operation at a time. Of an array in **registered memory** the chunk queue carries no
bytes, but the place of each chunk in a segment that the peer has mapped, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from aiocoll.native.layout import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.transport.frame import SEGMENT

__all__ = [
    "LEAST_BY_REFERENCE",
    "MIDDLE_PER_CHUNK",
    "MIDDLE_SLOTS",
    "MOST_BY_REFERENCE",
    "SMALL_PER_CHUNK",
    "SMALL_SLOTS",
    "PeerOutbox",
    "Segment",
]

#: So many small slots, or middle ones, hold what one chunk holds.
SMALL_PER_CHUNK = 32
MIDDLE_PER_CHUNK = 2

#: Bytes of a payload from which it is faster to read it where it lies.
LEAST_BY_REFERENCE = 64 * 1024
#: Most bytes of such a payload: enough that frames cost little, few enough that what comes behind need not wait long.
MOST_BY_REFERENCE = 16 * SEGMENT


class PeerOutbox(Protocol):
    """What a peer posts for this rank."""

    def has_news(self) -> bool:
        """Whether anything was posted, or all chunks of an operation were put, since the last time this was asked."""

    def unread(self) -> list[tuple[int, int, int]]:
        """Return operation, group and fingerprint of all posts for groups that are not over that were not read yet."""


class Segment:
    """Memory of this rank that peers can map.

    Attributes:
        number: its name at the peers, from 1.
        start: its address here.
        nbytes: its size.
        fd: its descriptor; -1 after its end.
        readers: called with its number at its end, one for each link whose peer it was offered to.
    """

    __slots__ = ("fd", "nbytes", "number", "readers", "start")

    def __init__(self, number: int, start: int, nbytes: int, fd: int) -> None:
        self.number = number
        self.start = start
        self.nbytes = nbytes
        self.fd = fd
        self.readers: list[Callable[[int], None]] = []

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
