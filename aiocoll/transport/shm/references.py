"""Frames whose payload stays where the writer has it, in a segment or in its process, and is read there: one copy.

    writer                                          reader
    entry with an address  ---------------------->  reads a piece, hands it out, reads the next ...
    the payload may be overwritten  <-------------  has taken the entry

A piece is read to where it belongs, if that is known. Else it is read into scratch memory that stays in the cache, and
reduced from there. A writer that fails before all is read voids the entry: the reader looks after each piece that it
has read, and drops the rest.
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

__all__ = ["InPlace", "ReferenceReader", "ReferenceWriter", "Unread", "UnreadableError"]

_BYTE = np.dtype(np.uint8)
#: Frames that may be unread: one is read while the next is written.
_MOST_UNREAD = 2
#: Bytes read at once: enough that the calls cost little, few enough that a callback ends in time.
_PIECE = 4 * SEGMENT


class InPlace:
    """The memory of a rank that has to do with payloads that are read in place.

    Args:
        registered_memory: its segments.
        random_bytes: makes the secret word of its process; None if peers shall not read that.
    """

    def __init__(self, registered_memory: RegisteredMemory, random_bytes: Callable[[int], bytes] | None) -> None:
        self.registered_memory = registered_memory
        self._random_bytes = random_bytes

    @property
    def is_wanted(self) -> bool:
        """Whether peers may, and as far as this process can tell alone, can read its memory."""
        return self._random_bytes is not None and can_read() is None

    @cached_property
    def memory(self) -> OwnMemory | None:
        """That of its process; None if peers shall not, or cannot, read it."""
        if self._random_bytes is None or not self.is_wanted:
            return None
        return OwnMemory(self._random_bytes)

    @cached_property
    def scratch(self) -> memoryview:
        """Where payloads of others are read that have no other place; made when the first one is."""
        return np.empty(SEGMENT, np.uint8).data


class Unread(NamedTuple):
    """A frame that the reader has not taken.

    Attributes:
        number: of its entry.
        owner: whose payload it is.
        read: called once it is read.
    """

    number: int
    owner: object
    read: Callable[[], None]


class ReferenceWriter:
    """Frames whose payload stays where this rank has it, and is read there by the peer: the writer's end.

    Args:
        out: the ring.
        kept: frames that wait for space in the ring; no frame may overtake them.
        sharing: of segments.
        own: memory of this rank.
        doorbell: wakes the peer.
        attach: whether the peer can read the memory of this process.

    Attributes:
        unread: the frames that the peer has not read, in order.
        ended: this side of the link has ended: no frame is written any more.
    """

    __slots__ = ("_doorbell", "_kept", "_memory", "_out", "_registered_memory", "_sharing", "ended", "unread")

    def __init__(
        self,
        out: RingWriter,
        kept: Collection[object],
        sharing: SegmentSharing,
        own: InPlace,
        doorbell: PeerDoorbell,
        *,
        attach: bool,
    ) -> None:
        self._out = out
        self._kept = kept
        self._doorbell = doorbell
        self.ended = False
        self._sharing = sharing
        self._registered_memory, self._memory = own.registered_memory, own.memory if attach else None
        self.unread: list[Unread] = []

    @property
    def full(self) -> bool:
        """Whether one has to be read before the next is written."""
        return len(self.unread) >= _MOST_UNREAD

    def find(self, payload: memoryview, *, attach: bool) -> tuple[int, int] | None:
        """Return where the peer can read a payload in place: number of the segment and offset; None if it cannot.

        Args:
            payload: with at least a byte.
            attach: it may also read the memory of this process: number 0 and the address.
        """
        segments = self._registered_memory.segments
        found = self._registered_memory.find(np.frombuffer(payload, np.uint8)) if segments else None
        if found is not None and self._sharing.can_map(found[0]):
            return found[0].number, found[1]
        if not attach or self._memory is None:
            return None
        address = address_of(payload)
        return (0, address) if _is_numpys(payload.obj) or self._memory.can_show(address) else None

    def write(self, header: bytes, place: tuple[int, int], owner: object, read: Callable[[], None]) -> bool:
        """Send one frame whose payload the peer reads in place; False if there is no space.

        Args:
            header: of the frame, with a payload of at most `MOST_BY_REFERENCE` bytes.
            place: where it lies, see `find`; it has to stay as it is until `read` is called, or `void`.
            owner: whose payload it is.
            read: called once the peer has read it.
        """
        if self._kept or self.ended:
            return False
        # Before the entry: the reader looks whether it is wanted after it has taken that.
        self._out.request_wakeup()
        number = self._out.point(header, *place)
        if number:
            self.unread.append(Unread(number, owner, read))
            self._doorbell.ring()
        return number > 0

    def collect(self) -> bool:
        """Say of what has been read that it is; whether there was any."""
        unread, taken, found = self.unread, self._out.taken, False
        while unread and unread[0].number <= taken:
            unread.pop(0).read()
            found = True
        return found

    def close(self) -> None:
        """The link has ended: nobody reads any more."""
        self.unread.clear()
        del self._out  # the memory goes with the last view of it

    def void(self, owner: object) -> None:
        """Report to the peer that what it has not read of `owner` may change from now on: the peer drops it."""
        for frame in self.unread:
            if frame.owner is owner:
                self._out.void(frame.number)


class UnreadableError(ConnectionResetError):
    """The memory that a frame points to cannot be read: its process is gone, or withdrew leave."""


def _is_numpys(memory: object) -> bool:
    """Whether NumPy has allocated it, so that the kernel can show it."""
    while isinstance(memory, np.ndarray):
        if memory.base is None:
            return bool(memory.flags.owndata)
        memory = memory.base
    return False


def _unreadable(error: OSError) -> UnreadableError:
    return UnreadableError(error.errno, f"cannot read the memory of its process: {error}")


class ReferenceReader:
    """The reader's end.

    Args:
        sharing: of segments.
        memory: of the peer's process; None if it cannot be read.
        own: memory of this rank.
        words: of the memory that both ends map.
        pieces: the word that counts what this end has read: odd while it reads, so that the writer polls on.
    """

    __slots__ = ("_memory", "_moved", "_own", "_pieces", "_sharing", "_words")

    def __init__(
        self, sharing: SegmentSharing, memory: PeerMemory | None, own: InPlace, words: memoryview, pieces: int
    ) -> None:
        self._words = words
        self._pieces = pieces
        self._sharing = sharing
        self._memory = memory
        self._own = own
        # Bytes of the present frame that have been handed out.
        self._moved = 0

    def take(self, link: ShmLink, segment: int, entry: memoryview, header: Header, is_over: Callable[[], bool]) -> bool:
        """Read a frame as `_take` does, and let its writer know meanwhile."""
        self.begin_read()
        try:
            return self._take(link, segment, entry, header, is_over)
        finally:
            self.end_read()

    def begin_read(self) -> None:
        """Report to the writer that its memory is being read."""
        self._words[self._pieces] |= 1

    def end_read(self) -> None:
        """Report to the writer that this is over for now."""
        self._words[self._pieces] = (self._words[self._pieces] | 1) + 1

    def _take(
        self, link: ShmLink, segment: int, entry: memoryview, header: Header, is_over: Callable[[], bool]
    ) -> bool:
        """Read a frame and hand it out piece by piece; False if time is over before the end, or the link has closed.

        Args:
            link: the end of the link that receives.
            segment: where the payload lies; 0 for the process.
            entry: the words of the entry in the ring.
            header: of the frame.
            is_over: whether this has taken long enough.

        Raises:
            UnreadableError: the memory is not there any more.
        """
        kind, flags, step, group, op, fingerprint, offset, length, total = header
        while self._moved < length:
            moved = self._moved
            nbytes = min(length - moved, _PIECE)
            piece = (kind, flags, step, group, op, fingerprint, offset + moved & 0xFFFFFFFF, nbytes, total)
            place = link.sink.route(link, piece)
            into = place
            if into is None:
                # It has to be worked with: as much of it as stays in the cache.
                nbytes = min(nbytes, SEGMENT)
                piece = (*piece[:7], nbytes, total)
                into = self._own.scratch[:nbytes]
            try:
                self._read(segment, entry[ADDRESS] + moved, into)
            except OSError as error:
                if not entry[PLACE] & VOID:
                    raise _unreadable(error) from None
            if entry[PLACE] & VOID:
                link.sink.withdrawn(link, header)
                break
            link.sink.deliver(link, piece, into if place is None else None)
            if link.closed:
                return False
            self._moved = moved + nbytes
            if self._moved < length and is_over():
                return False
        self._moved = 0
        return True

    def _in_segment(self, segment: int, address: int, nbytes: int) -> memoryview:
        found = self._sharing.read(segment, address, _BYTE, nbytes)
        if found is None:
            raise OSError(errno.EFAULT, "it is in no segment that its rank has shared")
        return found.data

    def _read(self, segment: int, address: int, into: memoryview) -> None:
        if segment:
            into[:] = self._in_segment(segment, address, into.nbytes)
        elif self._memory is None:
            raise OSError(errno.EPERM, "this process has no leave to read it")
        else:
            self._memory.read(address, into)
