"""Slots: a rank posts its contribution to a small operation once, and its readers find it by the operation's id.

Nothing is queued and nothing has to be removed in order: operation i has slot i modulo the number of slots, in each
lane. A slot is free again once all readers of its last post have read it; as long as one has not, `post` returns False,
and frames are sent instead. So no operation ever waits for another one's slot. The memory of a slot is reserved by the
first post that does not fit in its line.

    word 0  id of the operation
    word 1  id of the group
    word 2  length in bytes
    word 3  fingerprint
    words 4 to 7  the bytes, if they are few

The posts of a slot are numbered from 1. For each reader the writer has a word per slot, `named`: number of the last
post that it is to read. It is written when all of the post is there. A reader answers in its own outbox by `consumed`:
number of the last post that it is done with. It looks at a line only while `named` is larger, and the writer touches a
line only when `consumed` of all readers is the number of the last post. A reader to which there is no link any more, or
that has left the group, does not count: before the line is used again, what it was to read is withdrawn.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.errors import ProtocolError
from aiocoll.native import core
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import (
    CHUNKED,
    COMMON_CONSUMED,
    COMMON_NAMED,
    LANE_CONSUMED,
    LANE_NAMED,
    LINE,
    POSTS,
    SLOTS,
    SlotsLayout,
)
from aiocoll.transport.shm.region import OwnRegion

__all__ = ["CommonWriter", "LaneWriter", "SlotReader"]

_HEAD: Final = 32
_INLINE_NBYTES = LINE - _HEAD
#: Views of slots that are kept: a program has few call sites.
_VIEWS = 256
_NO_WORDS: Final = memoryview(bytes(8 * SLOTS)).cast("Q")


class _Slots:
    """Slots of a lane, as both ends see them."""

    __slots__ = ("_layout", "_lines", "_order", "_views", "memory")

    def __init__(self, memory: memoryview, layout: SlotsLayout, fences: Fences) -> None:
        self.memory = memory
        self._layout = layout
        self._lines = memory[layout.lines : layout.lines + SLOTS * LINE].cast("Q")
        self._order = fences.order
        self._views: dict[tuple[int, np.dtype[Any], int], NDArray[Any]] = {}

    def view(self, slot: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the first `count` elements of a slot, where they lie."""
        key = slot, dtype, count
        view = self._views.get(key)
        if view is None:
            inline = count * dtype.itemsize <= _INLINE_NBYTES
            place = self._layout.lines + slot * LINE + _HEAD if inline else self._layout.slot(slot)[0]
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = np.frombuffer(self.memory, dtype, count, place)
        return view

    def forget(self) -> None:
        """Release all views of the memory: cached plans may keep this object after its outbox is closed."""
        self._lines = self.memory = _NO_WORDS
        self._views.clear()


class _Writer(_Slots):
    """Slots of this rank.

    Args:
        region: the outbox.
        span: start and end of the lane in it.
        layout: of the lane.
        fences: of this machine.
    """

    __slots__ = ("_region", "_start", "posted", "ready")

    def __init__(self, region: OwnRegion, span: tuple[int, int], layout: SlotsLayout, fences: Fences) -> None:
        super().__init__(memoryview(region.memory)[span[0] : span[1]], layout, fences)
        self._region = region
        self._start = span[0]
        # Number of the last post of each slot, and whether its memory is there.
        self.posted = array("Q", bytes(8 * SLOTS))
        self.ready = bytearray(SLOTS)

    def _put(self, slot: int, identity: int, group: int, fingerprint: int, array: NDArray[Any], length: int) -> bool:
        """Fill a slot that is free; False if there is no memory for it."""
        view = self._views.get((slot, array.dtype, len(array)))
        if view is None:
            if not self.reserve(slot, array.nbytes):
                return False
            view = self.view(slot, array.dtype, len(array))
        lines, line = self._lines, slot << 3
        # First: a reader that was given up, and goes on, finds that this is not what it was reading.
        lines[line + 1] = group
        if self._order is not None:
            self._order()
        lines[line] = identity
        lines[line + 2] = length
        lines[line + 3] = fingerprint
        view[...] = array
        if self._order is not None:
            self._order()
        return True

    def reserve(self, slot: int, nbytes: int) -> bool:
        """Make the memory of a slot for so many bytes; False if the host has none."""
        if nbytes > _INLINE_NBYTES and not self.ready[slot]:
            place, size = self._layout.slot(slot)
            is_there = self._reserve_part(place, place + size)
            self.ready[slot] = is_there
            return is_there
        return True

    def _reserve_part(self, start: int, end: int) -> bool:
        return self._region.reserve(self._start + start, self._start + end)


class LaneWriter(_Writer):
    """What one peer reads: the slots of its lane, and words that say which posts it is to read.

    Args:
        region, span, layout, fences: as for `_Writer`.
        number: of the lane in its outbox.

    Attributes:
        words: of the lane.
        is_linked: whether there is a link to the peer; set by `connect` and `disconnect`.
        common_named, common_consumed: words of this rank and of the peer, one per slot of the common lane.
        consumed: words of the peer, one per slot of the lane.
        native: the accelerator's view of the lanes of the link; None without it.
    """

    __slots__ = (
        "_has_lines",
        "_named",
        "common_consumed",
        "common_named",
        "consumed",
        "is_linked",
        "native",
        "number",
        "words",
    )

    def __init__(
        self, region: OwnRegion, number: int, span: tuple[int, int], layout: SlotsLayout, fences: Fences
    ) -> None:
        super().__init__(region, span, layout, fences)
        self.number = number
        words = self.words = self.memory[: layout.lines].cast("Q")
        self._named = words[LANE_NAMED : LANE_NAMED + SLOTS]
        self.common_named = words[COMMON_NAMED : COMMON_NAMED + SLOTS]
        self.disconnect()
        self._has_lines = False
        self.native: core.PeerLanes | None = None

    @property
    def total(self) -> int:
        """How many posts the peer was to read, of this lane and of the common one."""
        return self.words[POSTS]

    def count_chunked(self) -> None:
        """Let the peer know that an operation has put its last chunk into the queue of the link."""
        self.words[CHUNKED] += 1

    def reset(self) -> bool:
        """Prepare for a new link: nothing is posted or consumed. Return False if there is no memory for it."""
        if not self._reserve_part(0, self._layout.lines):
            return False
        self.words[:] = _zeros(len(self.words))
        self.posted[:] = array("Q", bytes(8 * SLOTS))
        return True

    def connect(self, theirs: memoryview) -> None:
        """Use the words of the peer's lane for this rank: what it has consumed."""
        self.is_linked = True
        self.common_consumed = theirs[COMMON_CONSUMED : COMMON_CONSUMED + SLOTS]
        self.consumed = theirs[LANE_CONSUMED : LANE_CONSUMED + SLOTS]

    def disconnect(self) -> None:
        """Let go of the peer's memory: the link has ended."""
        self.is_linked = False
        self.common_consumed = self.consumed = _NO_WORDS

    def forget(self) -> None:
        """Also release the views of the memory of this rank."""
        super().forget()
        self.words = self.common_named = self._named = _NO_WORDS

    def post(
        self, slot: int, identity: int, group: int, fingerprint: int, array: NDArray[Any], length: int = 0
    ) -> bool:
        """Post a flat array that fits in the slot; False if the slot is not free, or the host has no memory for it.

        Args:
            slot: its number.
            identity: the operation's.
            group: of the operation.
            fingerprint: what the reader compares with its own.
            array: what is posted.
            length: its bytes, for a reader that has to compare them, too.
        """
        number = self.posted[slot]
        if self.consumed[slot] != number:
            return False
        # hot path: inlined from _Writer._put
        view = self._views.get((slot, array.dtype, len(array)))
        if view is None:
            if not self.reserve(slot, array.nbytes):
                return False
            view = self.view(slot, array.dtype, len(array))
        lines, line, order = self._lines, slot << 3, self._order
        lines[line + 1] = group
        if order is not None:
            order()
        lines[line] = identity
        lines[line + 2] = length
        lines[line + 3] = fingerprint
        view[...] = array
        if order is not None:
            order()
        self.posted[slot] = number = number + 1
        self._named[slot] = number
        if order is not None:
            order()
        self.words[POSTS] += 1
        return True

    def reserve(self, slot: int, nbytes: int) -> bool:
        """Make the memory of a slot, and of the lines, for so many bytes; False if the host has none."""
        if not self._has_lines:
            lines = self._layout.lines
            self._has_lines = self._reserve_part(lines, lines + SLOTS * LINE)
        return self._has_lines and super().reserve(slot, nbytes)


class CommonWriter(_Writer):
    """The common lane: what several peers read, posted once."""

    __slots__ = ("_readers", "native")

    def __init__(self, region: OwnRegion, span: tuple[int, int], layout: SlotsLayout, fences: Fences) -> None:
        super().__init__(region, span, layout, fences)
        # Of the last post of each slot.
        self._readers: list[Sequence[LaneWriter]] = [()] * SLOTS
        self.native = (
            None
            if core is None
            else core.CommonLane(self.memory, tuple(layout), self.posted, self.ready, self._readers, self.reserve)
        )

    def post(
        self,
        slot: int,
        identity: int,
        group: int,
        fingerprint: int,
        array: NDArray[Any],
        length: int,
        readers: Sequence[LaneWriter],
    ) -> bool:
        """As `LaneWriter.post`, for all peers whose lanes are `readers`."""
        number = self.posted[slot]
        gone = False
        for reader in self._readers[slot]:
            if reader.common_consumed[slot] != number:
                if reader.is_linked:
                    return False
                gone = True
        if gone:
            self._withdraw(slot)
        if not self._put(slot, identity, group, fingerprint, array, length):
            return False
        self.posted[slot] = number = number + 1
        self._readers[slot] = readers
        order = self._order
        for reader in readers:
            reader.common_named[slot] = number
            if order is not None:
                order()
            reader.words[POSTS] += 1
        return True

    def _withdraw(self, slot: int) -> None:
        """Withdraw a post from readers to which there is no link any more."""
        for reader in self._readers[slot]:
            if not reader.is_linked:
                reader.common_named[slot] = 0
        self._readers[slot] = ()

    def withdraw(self, reader: LaneWriter, group: int | None = None) -> None:
        """Withdraw what was posted for a group that a reader has left, or (with None) for any group."""
        for slot, readers in enumerate(self._readers):
            if reader in readers and (group is None or self._lines[(slot << 3) + 1] == group):
                if reader.common_consumed[slot] != self.posted[slot]:
                    reader.common_named[slot] = 0
                self._readers[slot] = [each for each in readers if each is not reader]


class SlotReader(_Slots):
    """Slots of a lane of a peer's: what `view` returns may be read after `look` and until `free`.

    Args:
        memory: the lane's part of the peer's outbox.
        layout: of the lane.
        named: words of the peer, one per slot.
        consumed: words of this rank, one per slot.
        fences: of this machine.
        peer: rank of the peer, for errors.
    """

    __slots__ = ("_consumed", "_named", "_over", "_peer", "_rows")

    def __init__(
        self,
        memory: memoryview,
        layout: SlotsLayout,
        named: memoryview,
        consumed: memoryview,
        fences: Fences,
        peer: int,
    ) -> None:
        super().__init__(memory, layout, fences)
        self._named = named
        self._consumed = consumed
        # Both as arrays, to find what is unread.
        self._rows = np.frombuffer(named, np.uint64), np.frombuffer(consumed, np.uint64)
        self._peer = peer
        self._over: set[int] = set()

    def look(self, slot: int, identity: int, group: int) -> int:
        """Return the fingerprint of what was posted for an operation of a group in its slot; -1 if nothing was."""
        if self._named[slot] <= self._consumed[slot]:
            return -1
        if self._order is not None:
            self._order()
        lines, line = self._lines, slot << 3
        if lines[line] != identity or lines[line + 1] != group:
            return -1
        return lines[line + 3]

    def length(self, slot: int) -> int:
        """Return the bytes that the peer says are there."""
        return self._lines[(slot << 3) + 2]

    def free(self, slot: int, group: int) -> None:
        """Be done with a post of a group.

        Raises:
            ProtocolError: the peer has given this rank up and reused the slot, so what was read may be anything.
        """
        if self._order is not None:
            self._order()
        if self._lines[(slot << 3) + 1] != group:
            raise ProtocolError(f"rank {self._peer} has given this rank up and overwritten what it was reading")
        self._consumed[slot] = self._named[slot]

    def unread(self) -> list[tuple[int, int, int]]:
        """Return operation, group and fingerprint of all posts for groups that are not over that were not read yet."""
        found = []
        for slot in self._unread():
            if not self.reclaim(slot):
                line = slot << 3
                found.append((self._lines[line], self._lines[line + 1], self._lines[line + 3]))
        return found

    def purge(self, group: int) -> None:
        """Consume all that was posted for a group that is over: nobody will read it."""
        self._over.add(group)
        for slot in self._unread():
            self.reclaim(slot)

    def release(self, group: int) -> None:
        """Forget that a group is over: nothing more is posted for it."""
        self._over.discard(group)

    def reclaim(self, slot: int) -> bool:
        """Consume what is in a slot if it was posted for a group that is over; it may come after `purge`."""
        number = self._named[slot]
        if number <= self._consumed[slot]:
            return False
        if self._order is not None:
            self._order()
        if self._lines[(slot << 3) + 1] not in self._over:
            return False
        self._consumed[slot] = number
        return True

    def detach(self) -> None:
        """Keep to itself what is consumed from now on: the words are for another link."""
        self._consumed = memoryview(bytearray(self._consumed)).cast("Q")
        self._rows = self._rows[0], np.frombuffer(self._consumed, np.uint64)

    def forget(self) -> None:
        """Also release the words of both ranks, after which nothing can be read."""
        super().forget()
        self._named = self._consumed = _NO_WORDS
        self._rows = np.frombuffer(_NO_WORDS, np.uint64), np.frombuffer(_NO_WORDS, np.uint64)

    def _unread(self) -> list[int]:
        """Return the slots in which something is unread."""
        named, consumed = self._rows
        unread: list[int] = np.flatnonzero(named > consumed).tolist()
        return unread


@functools.cache
def _zeros(count: int) -> memoryview:
    return memoryview(bytes(8 * count)).cast("Q")
