"""Slots: a rank posts its contribution to a small operation, and its peer finds it by the operation's id.

Nothing is queued and nothing has to be removed in order: operation i has slot i modulo the number of slots, in
each direction. A slot is free again once the peer has read it; if the previous operation of the slot is still unread,
`post` returns False, and a frame is sent instead. So no operation ever waits for another one's slot. The memory of a
slot is reserved by the first post that does not fit in its line.

    word 0  id of the operation; `NO_OPERATION` while the others are written, and written last
    word 1  id of the group; written after the fingerprint and the bytes
    word 2  how often the slot has been used, and in the upper bits the length, if that is told; written after the group
    word 3  fingerprint
    words 4 to 7  the bytes, if they are few
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import LINE, SLOTS, Direction
from aiocoll.transport.shm.region import SharedRegion

__all__ = ["NO_OPERATION", "SlotReader", "SlotWriter"]

_HEAD = 32
#: Bits of word 2 that count how often the slot has been used.
_TIMES = 40
_USED = (1 << _TIMES) - 1
_INLINE_NBYTES = LINE - _HEAD
#: In place of the id, while a slot is being written: operations are numbered from 1.
NO_OPERATION = 0
#: Views of slots that are kept: a program has few call sites.
_VIEWS = 256


@functools.lru_cache(maxsize=8)
def _places(direction: Direction) -> tuple[list[int], list[int]]:
    """Return the first words of all lines and the offsets of all slots; links share these lists."""
    first = direction.lines >> 3
    slots = [direction.small + number * direction.small_nbytes for number in range(SMALL_SLOTS)]
    slots += [direction.middle + number * direction.middle_nbytes for number in range(MIDDLE_SLOTS)]
    return [first + number * LINE // 8 for number in range(SLOTS)], slots


class _SlotEnd:
    """What both ends know: where the slots are."""

    __slots__ = ("_freed", "_lines", "_memory", "_order", "_posts", "_starts", "_views", "_words")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._order = fences.order
        self._lines, self._starts = _places(direction)
        self._freed = direction.freed
        self._posts = direction.posts
        self._views: dict[tuple[int, np.dtype[Any], int], NDArray[Any]] = {}

    def view(self, slot: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the first `count` elements of a slot, where they lie."""
        key = slot, dtype, count
        view = self._views.get(key)
        if view is None:
            inline = count * dtype.itemsize <= _INLINE_NBYTES
            place = (self._lines[slot] << 3) + _HEAD if inline else self._starts[slot]
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = np.frombuffer(self._memory, dtype, count, place)
        return view


class SlotWriter(_SlotEnd):
    """The writer's end."""

    __slots__ = ("_direction", "_posted", "_ready", "_region", "_total")

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        super().__init__(memoryview(region.memory), direction, fences)
        self._region = region
        self._direction = direction
        # Whether the memory of a slot is there.
        self._ready = [False] * SLOTS
        self._posted = [0] * SLOTS
        self._total = 0

    def post(
        self, slot: int, identity: int, group: int, fingerprint: int, array: NDArray[Any], length: int = 0
    ) -> bool:
        """Post a flat array that fits in the slot; False if the slot is not free, or the host has no memory for it."""
        words, times = self._words, self._posted[slot]
        if words[self._freed + slot] != times:
            return False
        view = self._views.get((slot, array.dtype, len(array)))
        if view is None:
            if array.nbytes > _INLINE_NBYTES and not self._ready[slot] and not self._reserve(slot):
                return False
            view = self.view(slot, array.dtype, len(array))
        line = self._lines[slot]
        # Until the post is complete, it must not be taken for the last one: this process may be stopped meanwhile.
        words[line] = NO_OPERATION
        view[...] = array
        words[line + 3] = fingerprint
        # Groups number their operations alike: the id may be there already, and then the group alone tells.
        if self._order is not None:
            self._order()
        words[line + 1] = group
        if self._order is not None:
            self._order()
        self._posted[slot] = times = times + 1
        words[line + 2] = times | length << _TIMES
        words[line] = identity
        if self._order is not None:
            self._order()
        words[self._posts] = self._total = self._total + 1
        return True

    def _reserve(self, slot: int) -> bool:
        start = self._starts[slot]
        end = start + (self._direction.small_nbytes if slot < SMALL_SLOTS else self._direction.middle_nbytes)
        self._ready[slot] = self._region.reserve(start, end)
        return self._ready[slot]


class SlotReader(_SlotEnd):
    """The reader's end: what `view` returns may be read after `look` and until `free`."""

    __slots__ = ("_over", "_seen")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        super().__init__(memory, direction, fences)
        self._seen = 0
        self._over: set[int] = set()

    def has_news(self) -> bool:
        """Whether anything was posted since the last time this was asked."""
        posts = self._words[self._posts]
        if posts == self._seen:
            return False
        self._seen = posts
        # What was posted is looked for next: no load of it may come before that of the count.
        if self._order is not None:
            self._order()
        return True

    def look(self, slot: int, identity: int, group: int) -> int:
        """Return the fingerprint of what was posted for an operation of a group in its slot; -1 if nothing was."""
        words, line = self._words, self._lines[slot]
        if words[line] != identity:
            return -1
        if self._order is not None:
            self._order()
        if words[line + 1] != group:
            return -1
        if self._order is not None:
            self._order()
        return words[line + 3]

    def is_unread(self, slot: int) -> bool:
        """Whether something was posted there that was not read: what `look` finds may have been read before."""
        unread = self._words[self._lines[slot] + 2] & _USED != self._words[self._freed + slot]
        if self._order is not None:
            self._order()
        return unread

    def length(self, slot: int) -> int:
        """Return the bytes that whoever posted says are there."""
        return self._words[self._lines[slot] + 2] >> _TIMES

    def free(self, slot: int) -> None:
        """Give the slot back, once for each post."""
        if self._order is not None:
            self._order()
        self._words[self._freed + slot] += 1

    def unread(self) -> list[tuple[int, int, int]]:
        """Return operation, group and fingerprint of all posts for groups that are not over that were not read yet."""
        words, lines = self._words, self._lines
        found = []
        for slot in range(SLOTS):
            if self.is_unread(slot):
                self.reclaim(slot)
                line = lines[slot]
                if self.is_unread(slot) and (operation := words[line]) != NO_OPERATION:
                    found.append((operation, words[line + 1], words[line + 3]))
        return found

    def purge(self, group: int) -> None:
        """Give back all that was posted for a group that is over: nobody will read it."""
        self._over.add(group)
        for slot in range(SLOTS):
            self.reclaim(slot)

    def release(self, group: int) -> None:
        """Forget that a group is over: nothing more is posted for it."""
        self._over.discard(group)

    def reclaim(self, slot: int) -> None:
        """Give the slot back if what is there was posted for a group that is over; it may come after `purge`."""
        words, line = self._words, self._lines[slot]
        # In this order: a post that is being made has its group before it counts.
        unread = words[line + 2] & _USED > words[self._freed + slot]
        if self._order is not None:
            self._order()
        if unread and words[line + 1] in self._over:
            self.free(slot)
