"""Frames by reference: the payload stays in the writer's process or segment, and the reader copies it from there.

    writer                                          reader
    entry with an address  ---------------------->  reads a piece, delivers it, reads the next ...
    the payload may be overwritten  <-------------  has taken the entry

The reader copies a piece to its destination if that is known. Otherwise it copies the piece to scratch memory that
stays in the cache, and reduces it from there. A writer that fails during the transfer voids the entry. The reader
checks for that after each piece, and drops the rest.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aiocoll.transport.frame import SEGMENT, Header
from aiocoll.transport.shm.doorbell import PeerDoorbell
from aiocoll.transport.shm.process_memory import OwnMemory, PeerMemory, address_of, can_read
from aiocoll.transport.shm.registered_memory import RegisteredMemory
from aiocoll.transport.shm.ring import ADDRESS, PLACE, VOID, RingWriter
from aiocoll.transport.shm.segment_sharing import SegmentSharing

if TYPE_CHECKING:
    from aiocoll.transport.shm.link import ShmLink

__all__ = ["InPlace", "ReferenceReader", "ReferenceWriter", "UnreadFrame", "UnreadableError"]

_BYTE = np.dtype(np.uint8)
#: Maximum number of unread frames by reference: the peer reads one while this rank writes the next.
_MOST_UNREAD = 2
#: Bytes per read: enough to make the call overhead small, and few enough to end a callback in time.
_PIECE = 4 * SEGMENT


class InPlace:
    """The settings and memory of one rank for reading in place.

    Args:
        registered_memory: the rank's segments.
        random_bytes: makes the secret word of its process; None if peers must not read the process.
    """

    def __init__(self, registered_memory: RegisteredMemory, random_bytes: Callable[[int], bytes] | None) -> None:
        self.registered_memory = registered_memory
        self._random_bytes = random_bytes

    @property
    def is_wanted(self) -> bool:
        """Return whether peers may read this process's memory, and a test read of its own memory succeeds."""
        return self._random_bytes is not None and can_read() is None

    @cached_property
    def memory(self) -> OwnMemory | None:
        """Return this process's memory for peers to read; None if they must not or cannot read it."""
        if self._random_bytes is None or not self.is_wanted:
            return None
        return OwnMemory(self._random_bytes)

    @cached_property
    def scratch(self) -> memoryview:
        """Return the buffer into which payloads are read before they are reduced. It is made on first use."""
        return np.empty(SEGMENT, np.uint8).data


class UnreadFrame(NamedTuple):
    """A frame by reference that the reader has not taken yet.

    Attributes:
        number: number of its entry.
        owner: owner of the payload.
        read: called once the peer has read the frame.
    """

    number: int
    owner: object
    read: Callable[[], None]


class ReferenceWriter:
    """The writing end of frames by reference: the peer reads their payloads in this rank's memory.

    Args:
        out: the frame ring.
        waiting: frames that wait for space in the ring; no frame may overtake them.
        sharing: the link's exchange of segments.
        own: memory of this rank.
        doorbell: wakes the peer.
        attach: whether the peer can read the memory of this process.

    Attributes:
        unread: the frames that the peer has not read, in order.
        ended: whether this side of the link has ended, so that no frame is written any more.
    """

    __slots__ = ("_doorbell", "_memory", "_out", "_registered_memory", "_sharing", "_waiting", "ended", "unread")

    def __init__(
        self,
        out: RingWriter,
        waiting: Collection[object],
        sharing: SegmentSharing,
        own: InPlace,
        doorbell: PeerDoorbell,
        *,
        attach: bool,
    ) -> None:
        self._out = out
        self._waiting = waiting
        self._doorbell = doorbell
        self.ended = False
        self._sharing = sharing
        self._registered_memory, self._memory = own.registered_memory, own.memory if attach else None
        self.unread: list[UnreadFrame] = []

    @property
    def full(self) -> bool:
        """Return whether the peer must read a frame before this rank can write the next one."""
        return len(self.unread) >= _MOST_UNREAD

    def find(self, payload: memoryview, *, attach: bool) -> tuple[int, int] | None:
        """Return the segment number and offset at which the peer can read a payload in place; None if it cannot.

        Args:
            payload: at least one byte.
            attach: the peer may also read the memory of this process: number 0 and the address.
        """
        segments = self._registered_memory.segments
        found = self._registered_memory.find(np.frombuffer(payload, np.uint8)) if segments else None
        if found is not None and self._sharing.can_map(found[0]):
            return found[0].number, found[1]
        if not attach or self._memory is None:
            return None
        address = address_of(payload)
        return (0, address) if _is_numpy_memory(payload.obj) or self._memory.can_show(address) else None

    def write(self, header: bytes, place: tuple[int, int], owner: object, read: Callable[[], None]) -> bool:
        """Send a frame whose payload the peer reads in place; return False if the ring has no space.

        Args:
            header: header of a frame with a payload of at most `MOST_BY_REFERENCE` bytes.
            place: place of the payload, from `find`. The payload stays the same until `read` or `invalidate` is called.
            owner: owner of the payload.
            read: called once the peer has read it.
        """
        if self._waiting or self.ended:
            return False
        # Request the wake-up before writing the entry: the reader checks for requests after it has taken the entry.
        self._out.request_wakeup()
        number = self._out.point(header, *place)
        if number:
            self.unread.append(UnreadFrame(number, owner, read))
            self._doorbell.ring()
        return number > 0

    def collect(self) -> bool:
        """Notify the operations whose payloads the peer has read; return whether there were any."""
        unread, taken, found = self.unread, self._out.taken, False
        while unread and unread[0].number <= taken:
            unread.pop(0).read()
            found = True
        return found

    def close(self) -> None:
        """Drop all unread frames, because the link is closed."""
        self.unread.clear()
        del self._out  # drop the view: the memory is unmapped with its last view

    def invalidate(self, owner: object) -> None:
        """Mark the unread payloads of `owner` as invalid: their memory may change now. The peer then drops them."""
        for frame in self.unread:
            if frame.owner is owner:
                self._out.invalidate(frame.number)


class UnreadableError(ConnectionResetError):
    """Raised when a frame's payload cannot be read: the writer has ended, or no longer permits reading its memory."""


def _is_numpy_memory(memory: object) -> bool:
    """Return whether NumPy has allocated this memory. The kernel can copy such memory to a peer."""
    while isinstance(memory, np.ndarray):
        if memory.base is None:
            return bool(memory.flags.owndata)
        memory = memory.base
    return False


def _make_unreadable_error(error: OSError) -> UnreadableError:
    return UnreadableError(error.errno, f"cannot read the memory of its process: {error}")


class ReferenceReader:
    """The reading end of frames by reference: it reads the payloads in the peer's memory.

    Args:
        sharing: the link's exchange of segments.
        memory: memory of the peer's process; None if it cannot be read.
        own: memory of this rank.
        words: words of the memory that both ends map.
        pieces: index of the word that counts the pieces this end has read. It is odd during a read, and the writer then
            keeps polling.
    """

    __slots__ = ("_delivered", "_memory", "_own", "_pieces", "_sharing", "_words")

    def __init__(
        self, sharing: SegmentSharing, memory: PeerMemory | None, own: InPlace, words: memoryview, pieces: int
    ) -> None:
        self._words = words
        self._pieces = pieces
        self._sharing = sharing
        self._memory = memory
        self._own = own
        # Number of delivered bytes of the current frame.
        self._delivered = 0

    def take(
        self, link: ShmLink, segment: int, entry: memoryview, header: Header, is_time_up: Callable[[], bool]
    ) -> bool:
        """Read the payload of a frame as `_take` does, and publish to the writer that a read is in progress."""
        self.begin_read()
        try:
            return self._take(link, segment, entry, header, is_time_up)
        finally:
            self.end_read()

    def begin_read(self) -> None:
        """Publish to the writer that this rank is reading a payload."""
        self._words[self._pieces] |= 1

    def end_read(self) -> None:
        """Publish to the writer that this rank has stopped reading a payload."""
        self._words[self._pieces] = (self._words[self._pieces] | 1) + 1

    def _take(
        self, link: ShmLink, segment: int, entry: memoryview, header: Header, is_time_up: Callable[[], bool]
    ) -> bool:
        """Read and deliver a frame's payload in pieces; return False if time runs out or the link closes.

        Args:
            link: the receiving end of the link.
            segment: number of the segment that contains the payload; 0 for the process.
            entry: the words of the entry in the ring.
            header: the frame's header.
            is_time_up: returns whether the time has run out.

        Raises:
            UnreadableError: the memory is not there any more.
        """
        kind, flags, step, group, op, fingerprint, offset, length, total = header
        while self._delivered < length:
            moved = self._delivered
            nbytes = min(length - moved, _PIECE)
            piece = (kind, flags, step, group, op, fingerprint, offset + moved & 0xFFFFFFFF, nbytes, total)
            place = link.sink.route(link, piece)
            into = place
            if into is None:
                # The payload will be reduced, so read only as much as stays in the cache.
                nbytes = min(nbytes, SEGMENT)
                piece = (*piece[:7], nbytes, total)
                into = self._own.scratch[:nbytes]
            try:
                self._read(segment, entry[ADDRESS] + moved, into)
            except OSError as error:
                if not entry[PLACE] & VOID:
                    raise _make_unreadable_error(error) from None
            if entry[PLACE] & VOID:
                link.sink.withdrawn(link, header)
                break
            link.sink.deliver(link, piece, into if place is None else None)
            if link.closed:
                return False
            self._delivered = moved + nbytes
            if self._delivered < length and is_time_up():
                return False
        self._delivered = 0
        return True

    def _view_segment(self, segment: int, address: int, nbytes: int) -> memoryview:
        found = self._sharing.read(segment, address, _BYTE, nbytes)
        if found is None:
            raise OSError(errno.EFAULT, "the peer has shared no segment that contains this address")
        return found.data

    def _read(self, segment: int, address: int, into: memoryview) -> None:
        if segment:
            into[:] = self._view_segment(segment, address, into.nbytes)
        elif self._memory is None:
            raise OSError(errno.EPERM, "this process may not read the peer's memory")
        else:
            self._memory.read(address, into)
