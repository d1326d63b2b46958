"""Slots: a rank posts its contribution to a small operation once, and readers find it by the operation's id.

There is no queue, and slots are freed in any order: operation i uses slot i modulo the number of slots, in each lane. A
slot is free once all readers of its last post have read it. Until then `post` returns False, and the rank sends frames
instead. So no operation ever waits for the slot of another one. The first post that does not fit in the line of a slot
reserves the slot's memory.

The line of a slot:

    word 0  id of the operation
    word 1  id of the group
    word 2  length in bytes
    word 3  fingerprint
    words 4 to 7  the contribution, if it is small

The posts of a slot are numbered from 1. For each reader the writer has one word per slot, `named`: the number of the
last post that the reader is to read. It is written once the post is complete. A reader answers in its own outbox with
`consumed`: the number of the last post that it has read. The reader looks at a line only while `named` is larger. The
writer changes a line only when `consumed` of all readers is the number of the last post. A reader without a link, or
one that has left the group, does not count: its post is withdrawn before the line is used again.
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
#: Maximum number of cached slot views. A program makes few different calls.
_VIEWS = 256
#: Largest value of a 64-bit word.
_LARGEST: Final = (1 << 64) - 1
_NO_WORDS: Final = memoryview(bytes(8 * SLOTS)).cast("Q")


def _increment(words: memoryview, index: int) -> None:
    """Add 1 to a 64-bit word, which overflows to 0, as in C."""
    words[index] = (words[index] + 1) & _LARGEST


class _Slots:
    """The slots of a lane, as writer and reader see them."""

    __slots__ = ("_layout", "_lines", "_order", "_views", "memory")

    def __init__(self, memory: memoryview, layout: SlotsLayout, fences: Fences) -> None:
        self.memory = memory
        self._layout = layout
        self._lines = memory[layout.lines : layout.lines + SLOTS * LINE].cast("Q")
        self._order = fences.order
        self._views: dict[tuple[int, np.dtype[Any], int], NDArray[Any]] = {}

    def view(self, slot: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return a view of the first `count` elements in a slot."""
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
        """Release all views of the memory, because cached plans may keep this object after its outbox has closed."""
        self._lines = self.memory = _NO_WORDS
        self._views.clear()


class _Writer(_Slots):
    """The slots of a lane that this rank writes.

    Args:
        region: the outbox.
        span: start and end of the lane in it.
        layout: layout of the lane.
        fences: the memory fences of this machine.
    """

    __slots__ = ("_region", "_start", "posted", "ready")

    def __init__(self, region: OwnRegion, span: tuple[int, int], layout: SlotsLayout, fences: Fences) -> None:
        super().__init__(memoryview(region.memory)[span[0] : span[1]], layout, fences)
        self._region = region
        self._start = span[0]
        # For each slot: the number of its last post, and whether its pages are allocated.
        self.posted = array("Q", bytes(8 * SLOTS))
        self.ready = bytearray(SLOTS)

    def _put(self, slot: int, identity: int, group: int, fingerprint: int, array: NDArray[Any], length: int) -> bool:
        """Write data to a free slot; return False if no memory is left for the slot."""
        view = self._views.get((slot, array.dtype, len(array)))
        if view is None:
            if not self.reserve(slot, array.nbytes):
                return False
            view = self.view(slot, array.dtype, len(array))
        lines, line = self._lines, slot << 3
        # Write the group before the other words. If this rank has given up a slow reader, the reader then detects that
        # its slot was reused.
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
        """Allocate a slot's pages for `nbytes` bytes; return False if the host has no memory left."""
        if nbytes > _INLINE_NBYTES and not self.ready[slot]:
            place, size = self._layout.slot(slot)
            is_there = self._reserve_part(place, place + size)
            self.ready[slot] = is_there
            return is_there
        return True

    def _reserve_part(self, start: int, end: int) -> bool:
        return self._region.reserve(self._start + start, self._start + end)


class LaneWriter(_Writer):
    """The lane for one peer: its slots, and the words that list which posts the peer has to read.

    Args:
        region, span, layout, fences: as for `_Writer`.
        number: number of the lane in its outbox.

    Attributes:
        words: the words of the lane.
        is_linked: whether there is a link to the peer; set by `connect` and `disconnect`.
        common_named, common_consumed: words of this rank and of the peer, one per slot of the common lane.
        consumed: words of the peer, one per slot of the lane.
        native: the accelerator's view of the link's lanes; None without the accelerator.
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
        """Return the number of posts for the peer so far, in this lane and in the common lane."""
        return self.words[POSTS]

    def count_chunked(self) -> None:
        """Publish to the peer that one more operation has written its last chunk to the link's chunk queue."""
        _increment(self.words, CHUNKED)

    def reset(self) -> bool:
        """Clear the lane for a new link; return False if no memory is left for the lane."""
        if not self._reserve_part(0, self._layout.lines):
            return False
        self.words[:] = _zeros(len(self.words))
        self.posted[:] = array("Q", bytes(8 * SLOTS))
        return True

    def connect(self, peer_words: memoryview) -> None:
        """Set the words in which the peer records the posts that it has consumed."""
        self.is_linked = True
        self.common_consumed = peer_words[COMMON_CONSUMED : COMMON_CONSUMED + SLOTS]
        self.consumed = peer_words[LANE_CONSUMED : LANE_CONSUMED + SLOTS]

    def disconnect(self) -> None:
        """Release the words of the peer, because the link has ended."""
        self.is_linked = False
        self.common_consumed = self.consumed = _NO_WORDS

    def forget(self) -> None:
        """Release all views of the memory, including those of this rank's own words."""
        super().forget()
        self.words = self.common_named = self._named = _NO_WORDS

    def post(
        self, slot: int, identity: int, group: int, fingerprint: int, array: NDArray[Any], length: int = 0
    ) -> bool:
        """Post a flat array that fits in a slot; return False if the slot is in use, or no memory is left for it.

        Args:
            slot: number of the slot.
            identity: id of the operation.
            group: id of the operation's group.
            fingerprint: compared with the reader's own.
            array: the contribution.
            length: the size in bytes that a reader compares with its own.
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
        _increment(self.words, POSTS)
        return True

    def reserve(self, slot: int, nbytes: int) -> bool:
        """Allocate pages for the lane's lines and for `nbytes` bytes in a slot; return False if no memory is left."""
        if not self._has_lines:
            lines = self._layout.lines
            self._has_lines = self._reserve_part(lines, lines + SLOTS * LINE)
        return self._has_lines and super().reserve(slot, nbytes)


class CommonWriter(_Writer):
    """The common lane: posts of this rank that several peers read."""

    __slots__ = ("_readers", "native")

    def __init__(self, region: OwnRegion, span: tuple[int, int], layout: SlotsLayout, fences: Fences) -> None:
        super().__init__(region, span, layout, fences)
        # For each slot: the readers of its last post.
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
        """Post an array, like `LaneWriter.post`, for all peers whose lanes are `readers`."""
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
            _increment(reader.words, POSTS)
        return True

    def _withdraw(self, slot: int) -> None:
        """Withdraw a post from readers whose links have ended."""
        for reader in self._readers[slot]:
            if not reader.is_linked:
                reader.common_named[slot] = 0
        self._readers[slot] = ()

    def withdraw(self, reader: LaneWriter, group: int | None = None) -> None:
        """Withdraw the posts to a reader for a group that it has left; for every group if `group` is None."""
        for slot, readers in enumerate(self._readers):
            if reader in readers and (group is None or self._lines[(slot << 3) + 1] == group):
                if reader.common_consumed[slot] != self.posted[slot]:
                    reader.common_named[slot] = 0
                self._readers[slot] = [each for each in readers if each is not reader]


class SlotReader(_Slots):
    """The slots of a peer's lane, for reading. A view of a slot is valid between `look` and `free`.

    Args:
        memory: the lane's part of the peer's outbox.
        layout: layout of the lane.
        named: words of the peer, one per slot.
        consumed: words of this rank, one per slot.
        fences: the memory fences of this machine.
        peer: rank of the peer, for errors.
    """

    __slots__ = ("_arrays", "_closed_groups", "_consumed", "_named", "_peer")

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
        # `named` and `consumed` as NumPy arrays, to find unread posts fast.
        self._arrays = np.frombuffer(named, np.uint64), np.frombuffer(consumed, np.uint64)
        self._peer = peer
        self._closed_groups: set[int] = set()

    def look(self, slot: int, identity: int, group: int) -> int:
        """Return the fingerprint of the post in a slot if it is for this operation of this group; otherwise -1."""
        if self._named[slot] <= self._consumed[slot]:
            return -1
        if self._order is not None:
            self._order()
        lines, line = self._lines, slot << 3
        if lines[line] != identity or lines[line + 1] != group:
            return -1
        return lines[line + 3]

    def length(self, slot: int) -> int:
        """Return the length in bytes of the post in a slot, as the peer has written it."""
        return self._lines[(slot << 3) + 2]

    def free(self, slot: int, group: int) -> None:
        """Free a slot after a post for `group` has been read.

        Raises:
            ProtocolError: the peer has given this rank up and reused the slot, so the data read is invalid.
        """
        if self._order is not None:
            self._order()
        if self._lines[(slot << 3) + 1] != group:
            raise ProtocolError(
                f"rank {self._peer} no longer waits for this rank, and has overwritten the slot being read"
            )
        self._consumed[slot] = self._named[slot]

    def unread(self) -> list[tuple[int, int, int]]:
        """Return the operation, group and fingerprint of each unread post for an open group."""
        found = []
        for slot in self._unread():
            if not self.reclaim(slot):
                line = slot << 3
                found.append((self._lines[line], self._lines[line + 1], self._lines[line + 3]))
        return found

    def purge(self, group: int) -> None:
        """Mark all posts for a closed group as consumed, because no operation will read them."""
        self._closed_groups.add(group)
        for slot in self._unread():
            self.reclaim(slot)

    def release(self, group: int) -> None:
        """Forget a closed group for which the peer posts no more data."""
        self._closed_groups.discard(group)

    def reclaim(self, slot: int) -> bool:
        """Mark the post in a slot as consumed if its group is closed, even after `purge`; return whether it was."""
        number = self._named[slot]
        if number <= self._consumed[slot]:
            return False
        if self._order is not None:
            self._order()
        if self._lines[(slot << 3) + 1] not in self._closed_groups:
            return False
        self._consumed[slot] = number
        return True

    def detach(self) -> None:
        """Record consumed posts only in this process from now on, because another link uses the shared words."""
        self._consumed = memoryview(bytearray(self._consumed)).cast("Q")
        self._arrays = self._arrays[0], np.frombuffer(self._consumed, np.uint64)

    def forget(self) -> None:
        """Release all views of the memory, including the words of both ranks. Afterwards no slot can be read."""
        super().forget()
        self._named = self._consumed = _NO_WORDS
        self._arrays = np.frombuffer(_NO_WORDS, np.uint64), np.frombuffer(_NO_WORDS, np.uint64)

    def _unread(self) -> list[int]:
        """Return the slots with unread posts."""
        named, consumed = self._arrays
        unread: list[int] = np.flatnonzero(named > consumed).tolist()
        return unread


@functools.cache
def _zeros(count: int) -> memoryview:
    return memoryview(bytes(8 * count)).cast("Q")
