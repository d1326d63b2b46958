"""Messages that stay where they lie: a slot says where that is, and the receiver reads them there, piece by piece.

    sender                                     receiver
    posts where the message lies  -------->    reads a piece, uses it, reads the next ...
    may overwrite the message     <--------    frees the slot

A sender that fails before all is read voids its post: the receiver looks after each piece, and stops.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.group import Sender
from aiocoll.transport.base import SharedMemoryLink
from aiocoll.transport.shared_memory import IN_PLACE

__all__ = ["Place", "find", "post", "read"]

_WORD: Final = np.dtype(np.uint64)


class Place(NamedTuple):
    """What a slot says of a message.

    Attributes:
        segment: number of the segment that it lies in; 0 is the memory of the sender's process.
        address: there.
        nbytes: of the message.
        step: of its operation.
    """

    segment: int
    address: int
    nbytes: int
    step: int


def post(channel: Sender, slot: int, operation: Operation, message: memoryview, step: int) -> SharedMemoryLink | None:
    """Say where a message lies; return over which link, None if the receiver cannot read there or the slot is taken."""
    link = channel.shared
    if link is None or link is not channel.link:
        return None
    place = link.place_of(message, attach=True)
    if place is None:
        return None
    said = np.array([*place, message.nbytes, step], _WORD)
    if not link.slot_writer.post(slot, operation.id, operation.comm.id, operation.fingerprint, said, IN_PLACE):
        return None
    link.announce()
    return link


def find(link: SharedMemoryLink, slot: int) -> Place | None:
    """Return what the slot says, whose fingerprint has been seen; None if it was voided."""
    if link.slot_reader.is_void(slot):
        return None
    return Place(*link.slot_reader.view(slot, _WORD, len(Place._fields)).tolist())


def read(
    operation: Operation, peer: int, slot: int, place: Place, start: int, nbytes: int, into: memoryview | None
) -> memoryview | None:
    """Read some bytes of a message that `peer` has posted; the last ones free the slot.

    Args:
        operation: the one it belongs to.
        peer: its rank in the group.
        slot: in which the post is.
        place: what the post says.
        start: where they begin in the message.
        nbytes: how many, at most `MOST_BY_REFERENCE`.
        into: where to read them; scratch memory, until the next call, by default.

    Returns:
        The bytes; None if the message was voided, or its process has ended.
    """
    channel = operation.comm.channels[peer]
    link = channel.shared
    assert link is not None
    reader = link.slot_reader
    reader.begin_read()
    try:
        piece = link.read(place.segment, place.address + start, nbytes, into)
    except OSError as error:
        if not reader.is_void(slot):
            operation.comm.call_soon(link.fail, error)
        return None
    if reader.is_void(slot):
        return None
    reader.end_read()
    if start + nbytes == place.nbytes:
        reader.free(slot)
        if link is channel.link:
            link.announce()
    return piece
