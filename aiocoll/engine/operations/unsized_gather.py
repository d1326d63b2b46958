"""The root's part in a gather whose root does not know how much comes: it makes room when it hears how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.base import Signature
from aiocoll.engine.operations.object_exchange import Post
from aiocoll.runtime import BUDGET
from aiocoll.transport.frame import SEGMENT
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Gathered"]

#: Bytes of the longest message that can be told by its first frame, which has their number modulo this.
LONGEST = 2**32 - 1

Array = NDArray[Any]


class Gathered(Post):
    """Takes a message of any length from every other rank, each of which carries out the plan of a gather.

    Args:
        terms: of that plan, without what only the two ends of a message know.
        source: this rank's own part.
        pack: makes the result of all parts, flat and in rank order.
    """

    __slots__ = ("_copied", "_own", "_pack", "_rooms", "_source")

    def __init__(
        self,
        group: Communicator,
        identity: int,
        terms: Signature,
        shape: tuple[int, ...],
        source: Array,
        pack: Callable[[list[Array]], Any],
        work: Work[Any],
        timeout: float,
    ) -> None:
        super().__init__(group, identity, terms.fingerprint(), terms, shape, group.others, LONGEST, work, timeout)
        self._source = source
        self._own = np.empty_like(source)
        self._copied = 0
        self._pack = pack
        self._rooms: dict[int, Array] = {}

    def enter(self) -> None:
        """Copy this rank's own part."""
        self.advance()

    def advance(self) -> None:
        """Copy a piece at a time, for as long as a callback may take."""
        source, own = self._source, self._own
        ticks = self.group.endpoint.runtime.ticks
        deadline, step = ticks() + BUDGET, max(SEGMENT // source.itemsize, 1)
        while self._copied < source.size:
            stop = self._copied + step
            own[self._copied : stop] = source[self._copied : stop]
            self._copied = min(stop, source.size)
            if self._copied < source.size and ticks() > deadline:
                self.put_off()
                return
        self._settle()

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived."""
        return sorted(self._missing)

    def _room(self, peer: int, total: int) -> memoryview | None:
        # Not a bytearray: that would be filled with zeros first, all of it at once.
        room = self._rooms.get(peer)
        if room is None:
            room = self._rooms[peer] = np.empty(total, np.uint8)
        return byte_view(room)

    def _settle(self) -> None:
        if self.done or self._missing or self._copied < self._source.size:
            return
        storage, rank = self._source.dtype, self.group.rank
        parts = [
            self._own if each == rank else self._rooms[each].view(storage) for each in range(len(self.group.ranks))
        ]
        self.succeed(self._pack(parts))
