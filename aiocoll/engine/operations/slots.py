"""Slots of the ranks of a host: small contributions, posted once and read where they lie.

A slot is found by the id of the operation. Which slot a contribution takes follows from its own length, which only its
two ends may know; the slot has that length, since the fingerprint may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Region
from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.round import Contribution, Take
from aiocoll.errors import ProtocolError
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_PER_CHUNK, SMALL_SLOTS

if TYPE_CHECKING:
    from aiocoll.engine.links.channel import Channel

__all__ = ["Slots", "region_of"]

_BYTES: Final = np.dtype(np.uint8)
_EMPTY: Final = np.empty(0, _BYTES)


def region_of(arrays: Sequence[NDArray[Any]], region: Region) -> NDArray[Any]:
    """Return the elements of a region; one without elements need not have an array."""
    start, stop = region.start, region.stop
    if start == stop:
        return _EMPTY
    array = arrays[region.buffer]
    return array if stop - start == len(array) else array[start:stop]


class Slots:
    """The slots of one group on this host, seen by one rank.

    Ranks are numbered as in the group. A peer has no slots until its link is open, nor if the link shares no memory.

    Args:
        channels: the channel to each rank.
        group: id of the group on the wire.
        chunk_nbytes: bytes of shared memory for the contributions of one operation; 0 if not all ranks share memory.

    Attributes:
        small, largest: bytes of the longest contribution that fits into a small slot, and into any.
    """

    __slots__ = ("_channels", "_group", "largest", "small")

    def __init__(self, channels: Sequence[Channel], group: int, chunk_nbytes: int) -> None:
        self._channels = channels
        self._group = group
        self.small = chunk_nbytes // SMALL_PER_CHUNK
        self.largest = chunk_nbytes // MIDDLE_SLOTS if chunk_nbytes else -1

    def slot(self, identity: int, nbytes: int) -> int:
        """Return the number of the slot of a contribution of `nbytes` to the operation with this id."""
        return identity % SMALL_SLOTS if nbytes <= self.small else SMALL_SLOTS + identity % MIDDLE_SLOTS

    def post(
        self, identity: int, fingerprint: int, contributions: Sequence[Contribution], arrays: Sequence[NDArray[Any]]
    ) -> list[tuple[int, NDArray[Any]]] | None:
        """Post regions of `arrays`; return the readers that have no free slot, with what they need in a frame."""
        channels, group, small = self._channels, self._group, self.small
        left: list[tuple[int, NDArray[Any]]] | None = None
        for region, readers in contributions:
            array = region_of(arrays, region)
            nbytes = array.nbytes
            # hot path: inlined from slot
            slot = identity % SMALL_SLOTS if nbytes <= small else SMALL_SLOTS + identity % MIDDLE_SLOTS
            for rank in readers:
                channel = channels[rank]
                link = channel.shared
                if (
                    link is not None
                    and link is channel.link
                    and link.slot_writer.post(slot, identity, group, fingerprint, array, nbytes)
                ):
                    link.announce()
                elif left is None:
                    left = [(rank, array)]
                else:
                    left.append((rank, array))
        return left

    def look(self, rank: int, identity: int, fingerprint: int, nbytes: int) -> bool:
        """Return whether `rank` has posted `nbytes` to an operation, of a call that matches this rank's."""
        link = self._channels[rank].shared
        if link is None:
            return False
        slot, reader = self.slot(identity, nbytes), link.slot_reader
        return reader.look(slot, identity, self._group) == fingerprint and reader.length(slot) == nbytes

    def deliver(self, operation: Any, peer: int, step: int, nbytes: int | None = None) -> bool:
        """Deliver what `peer` has posted to an operation, as if it came in a frame; return whether there was anything.

        Args:
            operation: gets it.
            peer: its sender.
            step: of the message.
            nbytes: its size; None if only its sender knows it.
        """
        link = self._channels[peer].shared
        if link is None:
            return False
        reader = link.slot_reader
        for most in (self.small, self.largest) if nbytes is None else (nbytes,):
            slot = self.slot(operation.id, most)
            found = reader.look(slot, operation.id, self._group)
            if found < 0:
                continue
            length, comm = reader.length(slot), operation.comm
            if found != operation.fingerprint or (nbytes is not None and length != nbytes):
                comm.mismatches.disagree(peer, operation.id, operation.describe())
                return False
            if length > most:
                raise ProtocolError(f"rank {peer} posted {length} bytes to a slot of {most}")
            operation.waited_for = peer
            operation.deliver(peer, step, length, byte_view(reader.view(slot, _BYTES, length)), length)
            operation.waited_for = -1
            reader.free(slot)
            return True
        return False

    def look_at(self, takes: Sequence[Take], first: int, identity: int, fingerprint: int, private: bool) -> int:
        """Return the number of the first take from `first` on that is not here.

        If a rank has posted something else, to a call that differs from this rank's, return -1 less that number.
        """
        channels, group = self._channels, self._group
        for number in range(first, len(takes)):
            rank, nbytes, _ = takes[number]
            link = channels[rank].shared
            if link is None:
                return number
            # hot path: inlined from slot
            slot = identity % SMALL_SLOTS if nbytes <= self.small else SMALL_SLOTS + identity % MIDDLE_SLOTS
            found = link.slot_reader.look(slot, identity, group)
            if found < 0:
                return number
            if found != fingerprint or (private and link.slot_reader.length(slot) != nbytes):
                return -1 - number
        return len(takes)

    def views(self, takes: Iterable[Take], identity: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """Return contributions that are here, where they lie; valid until `free`."""
        channels, small = self._channels, self.small
        found: list[NDArray[Any]] = []
        for rank, nbytes, region in takes:
            # hot path: inlined from slot
            slot = identity % SMALL_SLOTS if nbytes <= small else SMALL_SLOTS + identity % MIDDLE_SLOTS
            link = channels[rank].shared
            assert link is not None
            found.append(link.slot_reader.view(slot, dtype, region.stop - region.start))
        return found

    def free(self, takes: Iterable[Take], identity: int) -> None:
        """Let the ranks reuse the slots of contributions that have been read."""
        channels, small = self._channels, self.small
        for rank, nbytes, _ in takes:
            # hot path: inlined from slot
            slot = identity % SMALL_SLOTS if nbytes <= small else SMALL_SLOTS + identity % MIDDLE_SLOTS
            link = channels[rank].shared
            assert link is not None
            link.slot_reader.free(slot)

    def reclaim(self, rank: int, identity: int, nbytes: int) -> None:
        """Free the slot if it has a contribution to a group that has ended."""
        link = self._channels[rank].shared
        if link is not None:
            link.slot_reader.reclaim(self.slot(identity, nbytes))
