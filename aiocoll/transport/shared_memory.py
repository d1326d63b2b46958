"""What the engine asks of a link through memory that both of its ends map, and of memory that peers read in place.

A rank has an **outbox**, whose **slots** get its contributions to small operations: in the **common lane** what several
peers read, in the **lane** of a peer what only that one reads. A link has in each direction a **chunk queue**, which
carries the chunks of one large operation at a time. Of an array in **registered memory** the chunk queue carries no
bytes, but the place of each chunk in a segment that the peer has mapped, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    "Chunks",
    "CommonWriter",
    "LaneWriter",
    "PeerOutbox",
    "References",
    "RegisteredMemory",
    "Segment",
    "SlotReader",
]

#: Slots of a lane, the small ones first: operations in flight at once that need no frames, twice over, since a
#: rank may be through with all of them before a peer has read the first.
SMALL_SLOTS: Final = 128
MIDDLE_SLOTS: Final = 4
#: So many small slots hold what one chunk holds, as all middle slots together do.
SMALL_PER_CHUNK = 64

#: Bytes of a payload from which it is faster to read it where it lies.
LEAST_BY_REFERENCE = 64 * 1024
#: Most bytes of such a payload: enough that frames cost little, few enough that what comes behind need not wait long.
MOST_BY_REFERENCE = 16 * SEGMENT


class LaneWriter(Protocol):
    """The slots in which this rank posts what only one peer reads."""

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


class CommonWriter(Protocol):
    """The slots in which this rank posts what several peers read."""

    def post(
        self,
        slot: int,
        identity: int,
        group: int,
        fingerprint: int,
        array: NDArray[Any],
        length: int,
        readers: Sequence[Any],
    ) -> bool:
        """As `LaneWriter.post`, for all peers whose `LaneWriter` is one of `readers`."""


class SlotReader(Protocol):
    """The slots of a lane of a peer: what `view` returns may be read after `look` and until `free`."""

    def look(self, slot: int, identity: int, group: int) -> int:
        """Return the fingerprint of what was posted for an operation of a group in its slot; -1 if nothing was."""

    def length(self, slot: int) -> int:
        """Return the bytes that the peer says are there."""

    def view(self, slot: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the first `count` elements in a slot, where they lie; they cannot be written."""

    def free(self, slot: int, group: int) -> None:
        """Be done with a post of a group.

        Raises:
            ProtocolError: it was overwritten meanwhile, since the peer has given this rank up.
        """

    def reclaim(self, slot: int) -> bool:
        """Be done with what is in a slot if it was posted for a group that is over; return whether it was."""


class PeerOutbox(Protocol):
    """What a peer posts for this rank."""

    def has_news(self) -> bool:
        """Whether anything was posted since the last time this was asked."""

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


class Chunks(Protocol):
    """The chunk queues of a link: this rank writes one, and reads the other one.

    To the peer go `take`, `put` or `point` for each chunk, and `leave`; from the peer come `look`, `read`, `is_void`
    and `free` for each.
    """

    @property
    def number(self) -> int:
        """How many chunks have been put."""

    def take(self, holder: object) -> bool:
        """Reserve the queue to the peer for `holder`; False if it is not available."""

    def leave(self, *, failed: bool) -> None:
        """Let others use that queue; `failed`: chunks may be in it that are never read."""

    def can_map(self, segment: Segment) -> bool:
        """Return whether the peer has mapped `segment`, which is offered to it if it has not been."""

    def put(self, identity: int, group: int, fingerprint: int, chunk: memoryview) -> bool:
        """Copy the next chunk into the queue; False if there is no room, and the peer will then wake this rank."""

    def point(self, identity: int, group: int, fingerprint: int, segment: int, offset: int) -> bool:
        """As `put`, of a chunk that is read in place: it has to stay as it is until it is taken, or `void`."""

    def is_taken(self, number: int) -> bool:
        """Return whether the peer is done with the first `number` chunks; if not, it will wake this rank."""

    def void(self, identity: int, group: int) -> None:
        """Report to the peer that what a failed operation points to may change from now on."""

    def look(self, identity: int, group: int) -> int:
        """Return the fingerprint of the peer's next chunk, if it is for an operation of a group; -1 if not."""

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any] | None:
        """Return the next chunk where it lies, until it is freed; None if it is not to be had any more."""

    def is_void(self) -> bool:
        """Return whether the next chunk may have been overwritten, before this call or while it was read."""

    def free(self) -> bool:
        """Be done with the next chunk; return whether its writer may have to be woken."""

    def reclaim(self) -> bool:
        """Free the next chunks as long as they are of groups that are over; return whether there were any."""


class References(Protocol):
    """Frames whose payload stays where this rank has it, and is read there by the peer."""

    def find(self, payload: memoryview, *, attach: bool) -> tuple[int, int] | None:
        """Return where the peer can read a payload in place: number of the segment and offset; None if it cannot.

        Args:
            payload: with at least a byte.
            attach: it may also read the memory of this process: number 0 and the address.
        """

    def write(self, header: bytes, place: tuple[int, int], owner: object, read: Callable[[], None]) -> bool:
        """Send one frame whose payload the peer reads in place; False if there is no space.

        Args:
            header: of the frame, with a payload of at most `MOST_BY_REFERENCE` bytes.
            place: where it lies; it has to stay as it is until `read` is called, or `void`.
            owner: whose payload it is.
            read: called once the peer has read it.
        """

    def void(self, owner: object) -> None:
        """Report to the peer that what it has not read of `owner` may change from now on: the peer drops it."""


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
