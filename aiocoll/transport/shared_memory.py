"""Interfaces and sizes of shared memory that the engine uses.

A rank has an **outbox**. Its **slots** hold the rank's contributions to small operations: the **common lane** those for
several peers, the **lane** of a peer those for that peer alone. In each direction a link has a **chunk queue**, which
carries the chunks of one large operation at a time. For an array in **registered memory** the queue carries only the
place of each chunk in a segment, which the peer has mapped.
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

#: Number of small slots, and number of middle slots, that are together as large as one chunk.
SMALL_PER_CHUNK = 32
MIDDLE_PER_CHUNK = 2

#: Smallest payload in bytes for which reading in place is faster than the ring.
LEAST_BY_REFERENCE = 64 * 1024
#: Largest payload in bytes of a frame by reference. At this size, the cost per frame is small, and later frames do not
#: wait long.
MOST_BY_REFERENCE = 16 * SEGMENT


class PeerOutbox(Protocol):
    """A peer's outbox: the memory in which the peer posts data for this rank."""

    def has_news(self) -> bool:
        """Return whether, since the last call, the peer has posted data or written the last chunk of an operation."""

    def unread(self) -> list[tuple[int, int, int]]:
        """Return the operation, group and fingerprint of each unread post for an open group."""


class Segment:
    """A memory segment of this rank that peers can map.

    Attributes:
        number: number of the segment in messages to peers, from 1.
        start: its address in this process.
        nbytes: its size in bytes.
        fd: its descriptor; -1 once it is closed.
        readers: callbacks for the end of the segment, one per link on which it was offered; called with its number.
    """

    __slots__ = ("fd", "nbytes", "number", "readers", "start")

    def __init__(self, number: int, start: int, nbytes: int, fd: int) -> None:
        self.number = number
        self.start = start
        self.nbytes = nbytes
        self.fd = fd
        self.readers: list[Callable[[int], None]] = []

    def close(self) -> None:
        """Close the segment's file descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
