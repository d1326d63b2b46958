"""Layouts of shared memory: a link's region, and a rank's outbox.

    region of a link    page of words and lines of chunks | direction 0 | direction 1

    a direction:        entries of the ring | data of the ring | bytes of chunks
                        direction 0 starts at the rank that dialled

    outbox of a rank    words of its doorbell | lines of the common lane | bytes of its slots | a lane for each rank

    a lane              posts | named | consumed | lines | bytes of its slots

Both ends write to the region of a link. Only the rank itself writes to its outbox; its peers map the outbox read-only.

Each word that one side writes and the other side polls has a cache line of its own, or shares it with similar words.

A writer reserves memory before it writes there, so the memory of a link depends on its traffic. Readers look only at
the words and lines, which are reserved from the beginning, and at the places that these words and lines announce.
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

#: Number of entries in a frame ring. A burst of 256 small frames fits, even if the reader's event loop is busy.
ENTRIES = 256
#: Bytes of ring data allocated from the beginning: enough for some small frames.
FIRST = 8 * 1024
_FEW = 8
"""Maximum number of ranks on a host for large links (up to 3 MiB each). With more ranks, each has many links."""

_SHIFT = 64
"""Bytes by which chunks and middle slots start after the start of a page. NumPy's large arrays start 16 bytes after the
start of a page. If chunks started there, a copy to such an array would take up to twenty times as long on AMD's Zen
cores (see `copy_bytes` in native/copying.c)."""

_MORE_LANES = 8
"""Number of spare lanes, for links opened while another link to the same rank exists. One of the two is closed."""


class Direction(NamedTuple):
    """The layout of one direction of a link: indices of 8-byte words, offsets in bytes and sizes in bytes."""

    writer_waiting: int
    """Index of the word that is set while the writer of the frame ring waits for space."""
    taken: int
    """Index of the word with the number of entries that the reader of the frame ring has taken."""
    chunk_writer_waiting: int
    """Index of the word that is set while the writer of the chunk queue waits for space."""
    chunks_taken: int
    """Index of the word with the number of chunks that the reader of the chunk queue has taken."""
    pieces: int
    """Index of the word with twice the number of pieces read in place, plus one while another piece is being read."""
    lines: int
    """Offset of the lines that describe chunks, one line per chunk of the queue."""
    ring: int
    data: int
    data_nbytes: int
    chunks: int
    chunk_nbytes: int
    chunks_count: int

    @property
    def data_end(self) -> int:
        """Return the offset at which the frame ring's data area ends."""
        return self.data + self.data_nbytes

    @property
    def end(self) -> int:
        """Return the offset at which this direction's memory ends."""
        end = self.chunks + self.chunks_count * self.chunk_nbytes
        return end + -end % PAGE

    def with_large_chunks(self) -> Direction:
        """Return this layout with fewer and larger chunks, for links on which an end runs without the accelerator."""
        nbytes = self.chunks_count * self.chunk_nbytes
        return self._replace(chunk_nbytes=nbytes // LARGE_CHUNKS, chunks_count=LARGE_CHUNKS)

    def first(self) -> tuple[tuple[int, int], ...]:
        """Return (start, end) pairs to allocate before use: the words of both directions, and the start of the ring."""
        return (0, PAGE), (self.ring, self.data + FIRST)


class LinkLayout:
    """The layout of a link's region on a host with `ranks` ranks, equal at both ends.

    Attributes:
        nbytes: size of the whole region, in bytes.
        directions: the direction from the rank that dialled, then the direction to it.
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
            chunks=data + segments * SEGMENT + _SHIFT,
            chunk_nbytes=_chunk_nbytes(ranks),
            chunks_count=CHUNKS,
        )


class SlotsLayout(NamedTuple):
    """The layout of a lane's slots: offsets and sizes in bytes, equal at both ends."""

    lines: int
    small: int
    small_nbytes: int
    middle: int
    middle_nbytes: int
    end: int

    def slot(self, number: int) -> tuple[int, int]:
        """Return a slot's offset and size in bytes."""
        if number < SMALL_SLOTS:
            return self.small + number * self.small_nbytes, self.small_nbytes
        return self.middle + (number - SMALL_SLOTS) * self.middle_nbytes, self.middle_nbytes


class OutboxLayout:
    """The layout of a rank's outbox on a host with at most `ranks` ranks.

    Attributes:
        common: the common lane, at the beginning of the outbox.
        lane: each other lane; offsets count from the beginning of the lane.
        lanes: the number of other lanes: one for each rank, and some spare ones.
        nbytes: size of the whole outbox, in bytes.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.common = _slots((CORE + 8) * 8, ranks)
        self.lane = _slots(LANE_WORDS * 8, ranks)
        self.lanes = ranks + _MORE_LANES
        self.nbytes = self.common.end + self.lanes * self.lane.end

    def lane_span(self, number: int) -> tuple[int, int]:
        """Return the start and end offsets of a lane."""
        start = self.common.end + number * self.lane.end
        return start, start + self.lane.end


def _slots(lines: int, ranks: int) -> SlotsLayout:
    chunk = _chunk_nbytes(ranks)
    small_nbytes, middle_nbytes = chunk // SMALL_PER_CHUNK, chunk // MIDDLE_PER_CHUNK
    small = lines + SLOTS * LINE
    small += -small % PAGE
    middle = small + SMALL_SLOTS * small_nbytes + _SHIFT
    end = middle + MIDDLE_SLOTS * middle_nbytes
    return SlotsLayout(lines, small, small_nbytes, middle, middle_nbytes, end + -end % PAGE)


def _chunk_nbytes(ranks: int) -> int:
    return SEGMENT // 2 if ranks <= _FEW else SEGMENT // 8
