"""A lane: the pieces of one large operation at a time, in order, each in a block that stays in the cache.

While one operation has the lane, others go through the frame ring; the reader of the lane takes pieces only for the
operation they belong to. So an operation that its reader has not entered delays no other one.

    word 0  number of the piece in the lane, counted from 1; written last
    word 1  tag: group and fingerprint
    word 2  id of the operation
    word 3  where the piece is: 0 in the block, else the number of a plot of its writer's; see `commons`
    word 4  its offset in the plot
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import BLOCKS, LANE, LINE, Direction
from aiocoll.transport.shm.region import SharedRegion

__all__ = ["ChunkQueueReader", "ChunkQueueWriter"]

#: In word 3: the memory is its owner's again, who may have overwritten the piece. No plot has this number.
_VOID = (1 << 64) - 1


class _Side:
    """What both ends know: where the blocks are."""

    __slots__ = ("_blocks", "_full", "_hungry", "_lines", "_memory", "_order", "_taken", "_words")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._order, self._full = fences
        self._hungry = direction.lane_hungry
        self._taken = direction.lane_taken
        self._lines = [(direction.lines >> 3) + (BLOCKS + number) * LINE // 8 for number in range(LANE)]
        self._blocks = [direction.lane + number * direction.lane_nbytes for number in range(LANE)]


class ChunkQueueWriter(_Side):
    """The writer's end.

    Attributes:
        nbytes: of a block.
        holder: who has the lane; None if nobody.
        tainted: an operation has failed on the lane, whose pieces may never be read.
    """

    __slots__ = ("_number", "_ready", "_region", "holder", "nbytes", "tainted")

    def __init__(self, region: SharedRegion, direction: Direction, fences: Fences) -> None:
        self.nbytes = direction.lane_nbytes
        self.holder: object = None
        self.tainted = False
        self._region = region
        self._ready = False
        super().__init__(memoryview(region.memory), direction, fences)
        self._number = 0

    @property
    def number(self) -> int:
        """How many pieces have been put."""
        return self._number

    def take(self, holder: object) -> bool:
        """Get the lane for `holder`; False if it is not to be had.

        The first time, the blocks are reserved, which takes half a millisecond for those of 256 KiB.
        """
        if self.holder is not None or (self.tainted and self._words[self._taken] != self._number):
            return False
        if not self._ready and not self._reserve():
            return False
        self.tainted = False
        self.holder = holder
        return True

    def _reserve(self) -> bool:
        self._ready = self._region.reserve(self._blocks[0], self._blocks[-1] + self.nbytes)
        return self._ready

    def leave(self, *, failed: bool) -> None:
        """Give the lane up."""
        self.holder = None
        self.tainted = failed

    def put(self, identity: int, tag: int, piece: memoryview) -> bool:
        """Write the next piece of at most `nbytes`; False if no block is free yet, which the reader will then tell."""
        if not self.is_taken(self._number - LANE + 1):
            return False
        place = self._blocks[self._number % LANE]
        self._memory[place : place + piece.nbytes] = piece
        self._announce(identity, tag, 0, 0)
        return True

    def point(self, identity: int, tag: int, segment: int, offset: int) -> bool:
        """As `put`, of a piece that is read where it lies; it has to stay so until it is taken, or `void`."""
        if not self.is_taken(self._number - LANE + 1):
            return False
        self._announce(identity, tag, segment, offset)
        return True

    def is_taken(self, number: int) -> bool:
        """Whether the reader is done with the first `number` pieces; if not, it will tell."""
        words = self._words
        if words[self._taken] >= number:
            return True
        words[self._hungry] = 1
        self._full()
        return words[self._taken] >= number

    def void(self, identity: int, tag: int) -> None:
        """Let nobody trust what an operation that has failed points to: from here on its memory may change."""
        words = self._words
        for number in range(words[self._taken], self._number):
            line = self._lines[number % LANE]
            if words[line + 3] and words[line + 2] == identity and words[line + 1] == tag:
                words[line + 3] = _VOID
        self._full()

    def _announce(self, identity: int, tag: int, segment: int, offset: int) -> None:
        words, line = self._words, self._lines[self._number % LANE]
        words[line + 1] = tag
        words[line + 2] = identity
        words[line + 3] = segment
        words[line + 4] = offset
        if self._order is not None:
            self._order()
        self._number += 1
        words[line] = self._number


class ChunkQueueReader(_Side):
    """The reader's end."""

    __slots__ = ("_next", "_over")

    def __init__(self, memory: memoryview, direction: Direction, fences: Fences) -> None:
        super().__init__(memory, direction, fences)
        self._next = 1
        self._over: set[int] = set()

    def look(self, identity: int) -> int:
        """Return the tag of the next piece, if it is one of the operation's; -1 if not."""
        words, line = self._words, self._lines[(self._next - 1) % LANE]
        if words[line] != self._next:
            return -1
        if self._order is not None:
            self._order()
        return words[line + 1] if words[line + 2] == identity else -1

    def read(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the next piece where it lies, until `free`."""
        return np.frombuffer(self._memory, dtype, count, self._blocks[(self._next - 1) % LANE])

    def place(self) -> tuple[int, int]:
        """Return the plot of its writer's where the next piece is, and the offset there; (0, 0) if `read` has it."""
        line = self._lines[(self._next - 1) % LANE]
        return self._words[line + 3], self._words[line + 4]

    def is_void(self) -> bool:
        """Whether the next piece may have been overwritten, before this call or while it was read."""
        if self._order is not None:
            self._order()
        return self._words[self._lines[(self._next - 1) % LANE] + 3] == _VOID

    def free(self) -> bool:
        """Be done with the next piece; whether its writer may have to be woken."""
        if self._order is not None:
            self._order()
        words = self._words
        words[self._taken] = self._next
        self._next += 1
        self._full()
        if words[self._hungry]:
            words[self._hungry] = 0
            return True
        return False

    def end(self, group: int) -> None:
        """Know that a group is over: what is, or will be, written for it has no reader."""
        self._over.add(group)

    def reclaim(self) -> tuple[bool, bool]:
        """Be done with what comes next for groups that are over.

        Returns:
            Whether there was any, and whether its writer may have to be woken.
        """
        words = self._words
        freed = wanted = False
        while words[line := self._lines[(self._next - 1) % LANE]] == self._next:
            if self._order is not None:
                self._order()
            if words[line + 1] >> 32 not in self._over:
                break
            freed = True
            wanted = self.free() or wanted
        return freed, wanted
