"""Slots of the ranks of a host: shared memory for small contributions, which peers read in place.

The slot of a contribution follows from the ids of the operation and of the group, so that two groups that alternate use
different slots. The lane follows from the algorithm. The length of the contribution selects small or middle slots. Only
its two ends may know that length, so the slot stores it, since the fingerprint may not cover it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.buffers import byte_view
from aiocoll.engine.operations.round import Contribution, Round, Take, slots_of
from aiocoll.errors import ProtocolError
from aiocoll.transport.shared_memory import MIDDLE_PER_CHUNK, SMALL_PER_CHUNK, SMALL_SLOTS

if TYPE_CHECKING:
    from aiocoll.engine.links.channel import Channel
    from aiocoll.native import core
    from aiocoll.transport.base import SlotReader

__all__ = ["EMPTY", "Slots"]

_BYTES: Final = np.dtype(np.uint8)
EMPTY: Final = np.empty(0, _BYTES)


class Slots:
    """Access of this rank to the shared-memory slots of its group's ranks on this host.

    Ranks are numbered as in the group. A peer has no slots until its link is open, nor if the link shares no memory.

    Args:
        channels: the channel to each rank.
        group: id of the group on the wire.
        chunk_nbytes: bytes of a chunk in shared memory; 0 if not all ranks share memory.

    Attributes:
        small, largest: bytes of the longest contribution that fits into a small slot, and into any slot.
    """

    __slots__ = ("_channels", "_group", "_shift", "largest", "small")

    def __init__(self, channels: Sequence[Channel], group: int, chunk_nbytes: int) -> None:
        self._channels = channels
        self._group = group
        self._shift = group % SMALL_SLOTS
        self.small = chunk_nbytes // SMALL_PER_CHUNK
        self.largest = chunk_nbytes // MIDDLE_PER_CHUNK if chunk_nbytes else -1

    def post(
        self, identity: int, fingerprint: int, contributions: Sequence[Contribution], arrays: Sequence[NDArray[Any]]
    ) -> list[tuple[int, NDArray[Any]]] | None:
        """Post arrays in slots; return the readers without a free slot, with the array to send to each in a frame."""
        channels, group, place = self._channels, self._group, identity + self._shift
        left: list[tuple[int, NDArray[Any]]] | None = None
        for buffer, nbytes, readers, is_common, first_slot, slots in contributions:
            array = arrays[buffer] if nbytes else EMPTY
            slot = first_slot + place % slots
            if is_common:
                missed: Sequence[int] = self._post_to_all(slot, identity, fingerprint, array, readers)
            else:
                (rank,) = readers
                channel = channels[rank]
                link = channel.shared
                if (
                    link is not None
                    and link is channel.link
                    and link.lane_writer.post(slot, identity, group, fingerprint, array, nbytes)
                ):
                    link.announce()
                    continue
                missed = readers
            for rank in missed:
                if left is None:
                    left = []
                left.append((rank, array))
        return left

    def _post_to_all(
        self, slot: int, identity: int, fingerprint: int, array: NDArray[Any], readers: Sequence[int]
    ) -> Sequence[int]:
        """Post an array to the common lane, and return the readers that cannot read it there."""
        links, missed = [], []
        for rank in readers:
            channel = self._channels[rank]
            link = channel.shared
            if link is not None and link is channel.link:
                links.append(link)
            else:
                missed.append(rank)
        if not links:
            return readers
        lanes = [link.lane_writer for link in links]
        if not links[0].common_writer.post(slot, identity, self._group, fingerprint, array, array.nbytes, lanes):
            return readers
        links[0].announce_to(links)
        return missed

    def native_lanes(self, rank: int) -> core.PeerLanes | None:
        """Return the lanes between `rank` and this rank, as the C accelerator uses them; None if there are none."""
        channel = self._channels[rank]
        link = channel.shared
        return link.native if link is not None and link is channel.link else None

    def look(self, take: Take, identity: int, fingerprint: int) -> bool:
        """Return whether the peer of `take` has posted its contribution to an operation, for a matching call."""
        link = self._channels[take.peer].shared
        if link is None:
            return False
        reader = link.common_reader if take.is_common else link.lane_reader
        slot = take.first_slot + (identity + self._shift) % take.slots
        return reader.look(slot, identity, self._group) == fingerprint and reader.length(slot) == take.nbytes

    def deliver(self, operation: Any, peer: int, step: int, nbytes: int | None = None) -> bool:
        """Deliver a message that `peer` has posted, as if it came in a frame. Return whether there was a message.

        Args:
            operation: the operation that receives the message.
            peer: the sender.
            step: the step of the message.
            nbytes: length of the message; None if only the sender knows it.
        """
        link = self._channels[peer].shared
        if link is None:
            return False
        reader = link.lane_reader
        for most in (self.small, self.largest) if nbytes is None else (nbytes,):
            first_slot, slots = slots_of(most, self.small)
            slot = first_slot + (operation.id + self._shift) % slots
            found = reader.look(slot, operation.id, self._group)
            if found < 0:
                continue
            length, comm = reader.length(slot), operation.comm
            if found != operation.fingerprint or (nbytes is not None and length != nbytes):
                comm.mismatches.disagree(peer, operation.id, operation.describe())
                return False
            try:
                if length > most:
                    raise ProtocolError(f"rank {link.peer} posted {length} bytes to a slot of {most} bytes")
                operation.set_waited_for(peer)
                operation.deliver(peer, step, length, byte_view(reader.view(slot, _BYTES, length)), length)
            except ProtocolError as error:
                link.refuse(error)
                return False
            finally:
                operation.set_waited_for(-1)
            reader.free(slot, self._group)
            return True
        return False

    def look_at(
        self,
        step: Round,
        identity: int,
        fingerprint: int,
        dtype: np.dtype[Any],
        inputs: list[NDArray[Any]],
        seen: list[tuple[SlotReader, int]],
    ) -> bool:
        """Append views of contributions to `inputs` and their slots to `seen`, up to the first missing contribution.

        The first ``len(inputs)`` contributions are skipped. Views are valid until `free`. Return True if the rank of
        the missing contribution has posted data for a call that differs from this rank's.
        """
        channels, group, place = self._channels, self._group, identity + self._shift
        for rank, nbytes, elements, is_common, first_slot, slots in step.takes[len(inputs) :]:
            link = channels[rank].shared
            if link is None:
                return False
            reader = link.common_reader if is_common else link.lane_reader
            slot = first_slot + place % slots
            found = reader.look(slot, identity, group)
            if found != fingerprint or (step.private and reader.length(slot) != nbytes):
                return found >= 0
            inputs.append(reader.view(slot, dtype, elements) if nbytes else EMPTY)
            seen.append((reader, slot))
        return False

    def free(self, seen: Iterable[tuple[SlotReader, int]]) -> None:
        """Free the slots of contributions that this rank has read, so that their senders can reuse them."""
        for reader, slot in seen:
            reader.free(slot, self._group)

    def reclaim(self, take: Take, identity: int) -> None:
        """Free the slot of a contribution if the slot still holds data of a group that has ended."""
        link = self._channels[take.peer].shared
        if link is not None:
            reader = link.common_reader if take.is_common else link.lane_reader
            reader.reclaim(take.first_slot + (identity + self._shift) % take.slots)
