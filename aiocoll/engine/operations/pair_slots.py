"""Slots for blocks whose length only their two ends know, as in gather, scatter and alltoall.

Which slot a block takes follows from its own length, not from the longest of all; and the slot tells the length, since
the fingerprint does not.
"""

from __future__ import annotations

from aiocoll.engine.operations.group import Group
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS

__all__ = ["fits", "largest", "slot_of"]


def largest(comm: Group) -> int:
    """Return the bytes of the longest block that goes through a slot; 0 where the ranks share no memory."""
    return comm.chunk_nbytes // MIDDLE_SLOTS


def fits(comm: Group, nbytes: int) -> bool:
    """Whether a block goes through a slot."""
    return comm.chunk_nbytes > 0 and nbytes <= largest(comm)


def slot_of(comm: Group, op: int, nbytes: int) -> int:
    """Return the slot of a block that fits."""
    return op % SMALL_SLOTS if nbytes <= comm.small_nbytes else SMALL_SLOTS + op % MIDDLE_SLOTS
