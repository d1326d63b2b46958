"""The root's part in a gather of unknown size: it allocates memory when the sizes arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.object_exchange import Post
from aiocoll.engine.operations.signature import Signature
from aiocoll.errors import ProtocolError
from aiocoll.runtime import BUDGET
from aiocoll.transport.frame import SEGMENT
from aiocoll.work import Work

__all__ = ["Gathered", "Given"]

Array = NDArray[Any]
_BYTES = np.dtype(np.uint8)


class Given(NamedTuple):
    """The root's input.

    Attributes:
        source: its own part.
        pack: makes the result from all parts, flat and in rank order.
    """

    source: Array
    pack: Callable[[list[Array]], Any]


class Gathered(Post):
    """Receives a message of any length from every other rank; they carry out the plan of a gather.

    Args:
        signature: of that plan, without the fields that only the two ends of a message know.
        given: the root's input.
    """

    LIMIT = 2**32 - 1  # the largest size that a frame can tell: it has the length modulo 2**32

    __slots__ = ("_copied", "_own", "_pack", "_rooms", "_source")

    def __init__(
        self,
        comm: Group,
        identity: int,
        signature: Signature,
        given: Given,
        work: Work[Any],
    ) -> None:
        super().__init__(comm, identity, signature, comm.others, work)
        self._source, self._pack = given
        self._own = np.empty_like(given.source)
        self._copied = 0
        self._rooms: dict[int, Array] = {}

    def enter(self) -> None:
        """Copy this rank's own part, and take what has been posted."""
        self.advance()
        if not self.done:
            self.comm.polling.readers[self] = None

    def look(self) -> bool:
        """Take what has been posted since; return whether the operation has ended."""
        comm = self.comm
        if comm.chunk_nbytes:
            for peer in list(self._missing):
                for nbytes in (comm.slots.small, comm.slots.largest):
                    self._take(peer, comm.slots.slot(self.id, nbytes), nbytes)
        if self.done:
            comm.polling.readers.pop(self, None)
        return self.done

    def _take(self, peer: int, slot: int, most: int) -> None:
        """Take what a peer has posted to a slot, of `most` bytes."""
        comm = self.comm
        if (link := comm.channels[peer].shared) is None:
            return
        reader = link.slot_reader
        found = reader.look(slot, self.id, comm.id)
        if found < 0:
            return
        if found != self.fingerprint:
            comm.mismatches.disagree(peer, self.id, self.describe())
            return
        length = reader.length(slot)
        if length > most:
            raise ProtocolError(f"rank {peer} posted {length} bytes to a slot of {most}")
        comm.context.heard = comm.ranks[peer]
        self.deliver(peer, 0, length, byte_view(reader.view(slot, _BYTES, length)), length)
        comm.context.heard = -1
        reader.free(slot)

    def needs(self, peer: int) -> bool:
        """Whether the part of `peer` is missing: what it has posted stays readable after it has left."""
        return not self.look() and super().needs(peer)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self.comm.polling.readers.pop(self, None)
        super().fail(error)

    def advance(self) -> None:
        """Copy chunk by chunk, for as long as a callback may take; then take what has been posted."""
        source, own = self._source, self._own
        ticks = self.comm.runtime.ticks
        deadline, step = ticks() + BUDGET, max(SEGMENT // source.itemsize, 1)
        while self._copied < source.size:
            stop = self._copied + step
            own[self._copied : stop] = source[self._copied : stop]
            self._copied = min(stop, source.size)
            if self._copied < source.size and ticks() > deadline:
                self.put_off()
                return
        self._settle()
        if not self.done:
            self.look()

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived."""
        return sorted(self._missing)

    def _room(self, peer: int, total: int) -> memoryview | None:
        # Not a bytearray, which would be zeroed first, all of it at once.
        room = self._rooms.get(peer)
        if room is None:
            room = self._rooms[peer] = np.empty(total, np.uint8)
        return byte_view(room)

    def _settle(self) -> None:
        if self.done or self._missing or self._copied < self._source.size:
            return
        storage, rank = self._source.dtype, self.comm.rank
        parts = [self._own if each == rank else self._rooms[each].view(storage) for each in range(len(self.comm.ranks))]
        self.succeed(self._pack(parts))
