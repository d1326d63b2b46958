"""A board: what a rank contributes to a small operation, where its peer finds it by the operation's id.

Nothing is queued and nothing has to be taken away in order: operation i has block i modulo the number of blocks, in
each direction. A block is free again once the peer has read it; if the operation that had it before is still unread,
`post` says no, and the frame ring is the way. So no operation ever waits for another one's block.

    word 0  id of the operation; written last
    word 1  tag: group and fingerprint
    word 2  how often the block has been used
    words 3 to 7  the bytes, if they are few
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import BLOCKS, LINE, MIDDLE, SMALL, Direction

__all__ = ["Board", "Poster"]

_HEAD = 24
_INLINE_NBYTES = LINE - _HEAD
#: Views of blocks that are kept: a program has few call sites.
_VIEWS = 256


class _Side:
    """What both ends know: which block an operation has, and where it is."""

    __slots__ = ("_blocks", "_freed", "_lines", "_memory", "_order", "_small_nbytes", "_views", "_words")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._order = fences.order
        self._small_nbytes = direction.small_nbytes
        first = direction.lines >> 3
        self._lines = [first + number * LINE // 8 for number in range(BLOCKS)]
        self._freed = direction.freed
        self._blocks = [direction.small + number * direction.small_nbytes for number in range(SMALL)]
        self._blocks += [direction.middle + number * direction.middle_nbytes for number in range(MIDDLE)]

        self._views: dict[tuple[int, np.dtype[Any], int], NDArray[Any]] = {}

    def view(self, block: int, dtype: np.dtype[Any], count: int, nbytes: int) -> NDArray[Any]:
        """Return the `count` elements, `nbytes` in all, of a block."""
        key = block, dtype, count
        view = self._views.get(key)
        if view is None:
            place = (self._lines[block] << 3) + _HEAD if nbytes <= _INLINE_NBYTES else self._blocks[block]
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = np.frombuffer(self._memory, dtype, count, place)
        return view


class Poster(_Side):
    """The writer's end."""

    __slots__ = ("_posted",)

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        super().__init__(memory, direction, fences)
        self._posted = [0] * BLOCKS

    def post(self, identity: int, tag: int, array: NDArray[Any], nbytes: int) -> bool:
        """Show a flat array of `nbytes`, at most those of a middle block; False if its block is not free."""
        block = identity % SMALL if nbytes <= self._small_nbytes else SMALL + identity % MIDDLE
        words, times = self._words, self._posted[block]
        if words[self._freed + block] != times:
            return False
        line = self._lines[block]
        self.view(block, array.dtype, len(array), nbytes)[:] = array
        self._posted[block] = words[line + 2] = times + 1
        words[line + 1] = tag
        if self._order is not None:
            self._order()
        words[line] = identity
        return True


class Board(_Side):
    """The reader's end."""

    __slots__ = ()

    def look(self, identity: int, nbytes: int) -> int:
        """Return the tag of what was posted for an operation, whose block has room for `nbytes`; -1 if nothing was."""
        block = identity % SMALL if nbytes <= self._small_nbytes else SMALL + identity % MIDDLE
        line = self._lines[block]
        if self._words[line] != identity:
            return -1
        if self._order is not None:
            self._order()
        return self._words[line + 1]

    def read(self, identity: int, dtype: np.dtype[Any], count: int, nbytes: int) -> NDArray[Any]:
        """Return the `count` elements, `nbytes` in all, that were posted, where they lie; until `free`."""
        block = identity % SMALL if nbytes <= self._small_nbytes else SMALL + identity % MIDDLE
        return self.view(block, dtype, count, nbytes)

    def free(self, identity: int, nbytes: int) -> None:
        """Give the block of an operation back."""
        block = identity % SMALL if nbytes <= self._small_nbytes else SMALL + identity % MIDDLE
        self._free(block)

    def purge(self, group: int) -> None:
        """Give back all that was posted for a group that is over: nobody will read it."""
        for block, line in enumerate(self._lines):
            if self._words[line + 1] >> 32 == group:
                self._free(block)

    def _free(self, block: int) -> None:
        if self._order is not None:
            self._order()
        line = self._lines[block]
        self._words[self._freed + block] = self._words[line + 2]
