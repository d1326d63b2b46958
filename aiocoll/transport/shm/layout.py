"""Where things are in shared memory: the region of a link, and the outbox of a rank.

    region of a link    page of words and lines of chunks | direction 0 | direction 1

    a direction:        entries of the ring | data of the ring | bytes of chunks
                        direction 0 is from the rank that dialled

    outbox of a rank    words of its doorbell | lines of the common lane | bytes of its slots | a lane for each rank

    a lane              posts | named | consumed | lines | bytes of its slots

Both ends write into the region of a link. Into its outbox only the rank itself writes; its peers map it read-only.

Every word that one side writes and the other polls has a cache line of its own, or shares it with words like it.

Whoever writes somewhere has reserved it before, so what a link costs depends on what it carries; readers look only at
words and lines, which are there from the beginning, and at what these say has been written.
"""

from __future__ import annotations

from typing import NamedTuple

from aiocoll.native.layout import (
    CHUNKED,
    CHUNKS,
    COMMON_CONSUMED,
    COMMON_NAMED,
    CORE,
    LANE_CONSUMED,
    LANE_NAMED,
    LANE_WORDS,
    LARGE_CHUNKS,
    LINE,
    MIDDLE_SLOTS,
    POSTS,
    SLOTS,
    SMALL_SLOTS,
    STATUS,
)
from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.shared_memory import MIDDLE_PER_CHUNK, SMALL_PER_CHUNK
from aiocoll.transport.shm.region import PAGE

__all__ = [
    "CHUNKED",
    "CHUNKS",
    "COMMON_CONSUMED",
    "COMMON_NAMED",
    "CORE",
    "ENTRIES",
    "FIRST",
    "LANE_CONSUMED",
    "LANE_NAMED",
    "LINE",
    "POSTS",
    "SLOTS",
    "STATUS",
    "Direction",
    "LinkLayout",
    "OutboxLayout",
    "SlotsLayout",
]

#: Entries of a ring: a burst of this many small frames needs no turn of the reader's.
ENTRIES = 256
#: Bytes of a ring's data that are reserved from the beginning: enough for some small frames.
FIRST = 8 * 1024
_FEW = 8
"""Ranks of a host up to which links are large: 3 MiB each, if all is used. In larger worlds a rank has many."""

_MORE_LANES = 8
"""For links that are opened while another one to the same rank is open, or is being opened: one of them is given up."""


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
    pieces: int
    """Word: twice how many pieces its reader has read of what posts point to, and one while it reads another one."""
    lines: int
    """One line per chunk of the queue."""
    ring: int
    data: int
    data_nbytes: int
    chunks: int
    chunk_nbytes: int
    chunks_count: int

    @property
    def data_end(self) -> int:
        """End of the ring's data."""
        return self.data + self.data_nbytes

    @property
    def end(self) -> int:
        """End of the direction."""
        return self.chunks + self.chunks_count * self.chunk_nbytes

    def with_large_chunks(self) -> Direction:
        """Return the same with fewer and larger chunks in the same memory, as where an end has no accelerator."""
        nbytes = self.chunks_count * self.chunk_nbytes
        return self._replace(chunk_nbytes=nbytes // LARGE_CHUNKS, chunks_count=LARGE_CHUNKS)

    def first(self) -> tuple[tuple[int, int], ...]:
        """Start and end of what its writer reserves before either side looks, the words of both directions included."""
        return (0, PAGE), (self.ring, self.data + FIRST)


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
        segments = 2 if ranks <= _FEW else 1
        word = number * PAGE // 16
        data = start + ENTRIES * LINE
        return Direction(
            writer_waiting=word,
            taken=word + 16,
            chunk_writer_waiting=word + 32,
            chunks_taken=word + 48,
            pieces=word + 64,
            lines=(word + 80) * 8,
            ring=start,
            data=data,
            data_nbytes=segments * SEGMENT,
            chunks=data + segments * SEGMENT,
            chunk_nbytes=_chunk_nbytes(ranks),
            chunks_count=CHUNKS,
        )


class SlotsLayout(NamedTuple):
    """Slots of a lane, the same at both ends: offsets and sizes in bytes."""

    lines: int
    small: int
    small_nbytes: int
    middle: int
    middle_nbytes: int
    end: int

    def slot(self, number: int) -> tuple[int, int]:
        """Return where a slot is, and its size."""
        if number < SMALL_SLOTS:
            return self.small + number * self.small_nbytes, self.small_nbytes
        return self.middle + (number - SMALL_SLOTS) * self.middle_nbytes, self.middle_nbytes


class OutboxLayout:
    """The layout of the outbox of a rank that has at most `ranks` ranks on its host.

    Attributes:
        common: the common lane, at the beginning of the outbox.
        lane: of each other lane; offsets are from its beginning.
        lanes: how many others there are: one for each rank, and some more.
        nbytes: of the whole.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.common = _slots((CORE + 8) * 8, ranks)
        self.lane = _slots(LANE_WORDS * 8, ranks)
        self.lanes = ranks + _MORE_LANES
        self.nbytes = self.common.end + self.lanes * self.lane.end

    def lane_span(self, number: int) -> tuple[int, int]:
        """Return where a lane begins and ends."""
        start = self.common.end + number * self.lane.end
        return start, start + self.lane.end


def _slots(lines: int, ranks: int) -> SlotsLayout:
    chunk = _chunk_nbytes(ranks)
    small_nbytes, middle_nbytes = chunk // SMALL_PER_CHUNK, chunk // MIDDLE_PER_CHUNK
    small = lines + SLOTS * LINE
    small += -small % PAGE
    middle = small + SMALL_SLOTS * small_nbytes
    return SlotsLayout(lines, small, small_nbytes, middle, middle_nbytes, middle + MIDDLE_SLOTS * middle_nbytes)


def _chunk_nbytes(ranks: int) -> int:
    return SEGMENT // 2 if ranks <= _FEW else SEGMENT // 8
