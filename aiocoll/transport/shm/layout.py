"""Where things are in the memory of a link.

    page of words | direction 0 | direction 1        direction 0 is from the rank that dialled

    a direction:    entries of the ring | data of the ring | lines of slots and chunks | bytes of slots and chunks

Every word that one side writes and the other polls has a cache line of its own, or shares it with words like it.

Whoever writes somewhere has reserved it before, so what a link costs depends on what it carries; readers look only at
words and lines, which are there from the beginning, and at what these say has been written.
"""

from __future__ import annotations

from typing import NamedTuple

from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_PER_CHUNK, SMALL_SLOTS
from aiocoll.transport.shm.region import PAGE

__all__ = ["CHUNKS", "ENTRIES", "FIRST", "LINE", "SLOTS", "Direction", "LinkLayout"]

LINE = 64
#: Entries of a ring: a burst of this many small frames needs no turn of the reader's.
ENTRIES = 256
#: Bytes of a ring's data that are reserved from the beginning: enough for some small frames.
FIRST = 8 * 1024
SLOTS = SMALL_SLOTS + MIDDLE_SLOTS
#: Chunks that a queue holds: one is written while one is read, and as many again for when either is late.
CHUNKS = 4

_FEW = 8
"""Ranks of a host up to which links are large: 4.6 MiB each, if all is used. In larger worlds a rank has many."""


class Direction(NamedTuple):
    """Of one direction: indices of 8-byte words in the region, offsets in bytes, and sizes in bytes."""

    writer_waiting: int
    """Word: the writer of the ring waits for space."""
    taken: int
    """Word: entries the reader of the ring is done with."""
    chunk_writer_waiting: int
    """Word: the writer of the chunk queue waits for room."""
    chunks_taken: int
    """Word: chunks the reader of the queue is done with."""
    posts: int
    """Word: how often something was posted to the slots."""
    freed: int
    """Words, one per slot: posts its reader is done with."""
    pieces: int
    """Word: twice how many pieces its reader has read of what posts point to, and one while it reads another one."""
    ring: int
    data: int
    data_nbytes: int
    lines: int
    """One line per slot, then one per chunk of the queue."""
    small: int
    small_nbytes: int
    middle: int
    middle_nbytes: int
    chunks: int
    chunk_nbytes: int
    end: int

    def first(self) -> tuple[tuple[int, int], ...]:
        """Start and end of what its writer reserves before either side looks, the words of both directions included."""
        return (0, PAGE), (self.ring, self.data + FIRST), (self.lines, self.small)


class LinkLayout:
    """The layout for a host of `ranks` ranks, the same at both ends.

    Attributes:
        nbytes: of the whole region.
        directions: from the rank that dialled, and to it.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        first = self._direction(0, PAGE, ranks)
        second = self._direction(1, first.end, ranks)
        self.directions = first, second
        self.nbytes = second.end

    def _direction(self, number: int, start: int, ranks: int) -> Direction:
        segments, chunk = (2, SEGMENT) if ranks <= _FEW else (1, SEGMENT // 4)
        small, middle = chunk // SMALL_PER_CHUNK, chunk // MIDDLE_SLOTS
        word = number * PAGE // 16
        data = start + ENTRIES * LINE
        lines = data + segments * SEGMENT
        smalls = lines + (SLOTS + CHUNKS) * LINE
        smalls += -smalls % PAGE
        middles = smalls + SMALL_SLOTS * small
        chunks = middles + MIDDLE_SLOTS * middle
        end = chunks + CHUNKS * chunk
        return Direction(
            writer_waiting=word,
            taken=word + 16,
            chunk_writer_waiting=word + 32,
            posts=word + 40,
            chunks_taken=word + 48,
            freed=word + 64,
            pieces=word + 224,
            ring=start,
            data=data,
            data_nbytes=segments * SEGMENT,
            lines=lines,
            small=smalls,
            small_nbytes=small,
            middle=middles,
            middle_nbytes=middle,
            chunks=chunks,
            chunk_nbytes=chunk,
            end=end,
        )
