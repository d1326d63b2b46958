"""What the engine asks of a link through memory that both of its ends map, and of memory that peers read in place.

A link has in each direction **slots**, in which a rank posts its tensor of a small operation, and a **chunk queue**,
which carries the chunks of one large operation at a time. Of an array in **registered memory** the chunk queue carries
no bytes, but the place of each chunk in a segment that the peer has mapped, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aiocoll.transport.frame import SEGMENT

__all__ = [
    "LEAST_BY_REFERENCE",
    "MIDDLE_SLOTS",
    "MOST_BY_REFERENCE",
    "SMALL_PER_CHUNK",
    "SMALL_SLOTS",
    "ChunkReader",
    "ChunkWriter",
    "RegisteredMemory",
    "Segment",
    "SegmentReader",
    "SlotReader",
    "SlotWriter",
]

#: Slots in each direction, the small ones first: operations in flight at once that need no frames, twice over, since a
#: rank may be through with all of them before a peer has read the first.
SMALL_SLOTS: Final = 128
MIDDLE_SLOTS: Final = 4
#: So many small slots hold what one chunk holds, as all middle slots together do.
SMALL_PER_CHUNK = 64

#: Bytes of a payload from which it is faster to read it where it lies.
LEAST_BY_REFERENCE = 64 * 1024
#: Most bytes of such a payload: enough that frames cost little, few enough that what comes behind need not wait long.
MOST_BY_REFERENCE = 16 * SEGMENT


class SlotWriter(Protocol):
    """The slots in which this rank posts."""

    def post(
        self, slot: int, identity: int, group: int, fingerprint: int, array: NDArray[Any], length: int = 0
    ) -> bool:
        """Post a flat array that fits in the slot; False if the slot is not free, or there is no memory for it.

        Args:
            slot: its number.
            identity: the operation's.
            group: of the operation.
            fingerprint: what the reader compares with its own.
            array: what is posted.
            length: its bytes, for a reader that has to compare them, too.
        """


class SlotReader(Protocol):
    """The slots in which the peer posts: what `view` returns may be read after `look` and until `free`."""

    def has_news(self) -> bool:
        """Whether anything was posted since the last time this was asked."""

    def look(self, slot: int, identity: int, group: int) -> int:
        """Return the fingerprint of what was posted for an operation of a group in its slot; -1 if nothing was."""

    def is_unread(self, slot: int) -> bool:
        """Whether something was posted there that was not read: what `look` finds may have been read before."""

    def length(self, slot: int) -> int:
        """Return the bytes that whoever posted says are there."""

    def view(self, slot: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the first `count` elements in a slot, where they lie."""

    def free(self, slot: int) -> None:
        """Give the slot back, once for each post."""

    def unread(self) -> list[tuple[int, int, int]]:
        """Return operation, group and fingerprint of all posts for groups that are not over that were not read yet."""

    def reclaim(self, slot: int) -> None:
        """Give the slot back if what is there was posted for a group that is over."""


class ChunkWriter(Protocol):
    """The end of a chunk queue at which this rank writes."""

    @property
    def number(self) -> int:
        """How many chunks have been put."""

    def take(self, holder: object) -> bool:
        """Reserve the queue for `holder`; False if it is not available."""

    def leave(self, *, failed: bool) -> None:
        """Let others use the queue; `failed`: chunks may be in it that are never read."""

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview) -> bool:
        """Copy the next chunk into the queue; False if there is no room, and the reader will then wake this rank."""

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int) -> bool:
        """As `put`, of a chunk that is read in place: it has to stay as it is until it is taken, or `void`."""

    def is_taken(self, number: int) -> bool:
        """Whether the reader is done with the first `number` chunks; if not, it will wake this rank."""

    def void(self, identity: int, group: int) -> None:
        """Tell the reader that what a failed operation points to may change from now on."""


class ChunkReader(Protocol):
    """The end of a chunk queue at which this rank reads."""

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the next chunk, if it is for an operation of a group; -1 if not."""

    def is_void(self) -> bool:
        """Whether the next chunk may have been overwritten, before this call or while it was read."""

    def free(self) -> bool:
        """Be done with the next chunk; whether its writer may have to be woken."""


class SegmentReader(Protocol):
    """A link whose peer was offered a segment."""

    def withdraw(self, number: int) -> None:
        """The segment has ended."""


class Segment(Protocol):
    """Memory of this rank that peers can map."""

    number: int
    """Its name at the peers, from 1."""
    nbytes: int
    fd: int
    readers: list[SegmentReader]
    """To whom it has been offered."""


class RegisteredMemory(Protocol):
    """Memory of this rank that its peers read in place."""

    troubled: bool
    """Whether it has been logged that there is no more."""

    @property
    def segments(self) -> Sequence[Segment]:
        """What there is."""

    async def make(self, nbytes: int) -> NDArray[np.uint8]:
        """Return `nbytes` > 0 of zeroed memory in a segment of its own, in many turns of the loop.

        Raises:
            OSError: there is no memory or descriptor left, or the kernel forbids it.
        """

    def find(self, array: NDArray[Any]) -> tuple[Segment, int] | None:
        """Return the segment in which all of a contiguous array lies, and its offset there; None if there is none."""
