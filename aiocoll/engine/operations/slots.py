"""Slots of the ranks of a host: small contributions, posted once and read where they lie.

A slot is found by the id of the operation. Which slot a contribution takes follows from its own length, which only its
two ends may know; the slot has that length, since the fingerprint may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Region
from aiocoll.engine.operations.group import Sender
from aiocoll.engine.operations.round import Contribution, Take
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_PER_CHUNK, SMALL_SLOTS

__all__ = ["DIFFERENT", "HERE", "NOTHING", "Slots", "region_of"]

#: What `Slots.look` finds: nothing yet, the contribution, or one to a call that differs from this rank's.
NOTHING: Final = 0
HERE: Final = 1
DIFFERENT: Final = 2

_EMPTY: Final = np.empty(0, np.uint8)


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

    def __init__(self, channels: Sequence[Sender], group: int, chunk_nbytes: int) -> None:
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

    def look(self, rank: int, identity: int, fingerprint: int, nbytes: int) -> int:
        """Return whether `rank` has posted `nbytes` to an operation: `NOTHING`, `HERE` or `DIFFERENT`."""
        link = self._channels[rank].shared
        if link is None:
            return NOTHING
        slot = identity % SMALL_SLOTS if nbytes <= self.small else SMALL_SLOTS + identity % MIDDLE_SLOTS
        reader = link.slot_reader
        found = reader.look(slot, identity, self._group)
        if found < 0:
            return NOTHING
        if found == fingerprint and reader.length(slot) == nbytes:
            return HERE
        return DIFFERENT

    def look_at(self, takes: Sequence[Take], first: int, identity: int, fingerprint: int, private: bool) -> int:
        """Return the number of the first take from `first` on that is not here; -1 less than that if it is different.

        As `look` for each, in one call.
        """
        channels, group = self._channels, self._group
        for number in range(first, len(takes)):
            rank, nbytes, _ = takes[number]
            link = channels[rank].shared
            if link is None:
                return number
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
            slot = identity % SMALL_SLOTS if nbytes <= small else SMALL_SLOTS + identity % MIDDLE_SLOTS
            link = channels[rank].shared
            assert link is not None
            found.append(link.slot_reader.view(slot, dtype, region.stop - region.start))
        return found

    def free(self, takes: Iterable[Take], identity: int) -> None:
        """Let the ranks reuse the slots of contributions that have been read."""
        channels, small = self._channels, self.small
        for rank, nbytes, _ in takes:
            slot = identity % SMALL_SLOTS if nbytes <= small else SMALL_SLOTS + identity % MIDDLE_SLOTS
            link = channels[rank].shared
            assert link is not None
            link.slot_reader.free(slot)

    def reclaim(self, rank: int, identity: int, nbytes: int) -> None:
        """Free the slot if it has a contribution to a group that has ended."""
        link = self._channels[rank].shared
        if link is not None:
            link.slot_reader.reclaim(self.slot(identity, nbytes))
