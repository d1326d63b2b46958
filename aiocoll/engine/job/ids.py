"""Ids: hashes of names, which are equal on all ranks."""

from __future__ import annotations

from hashlib import blake2b

from aiocoll.errors import ProtocolError

__all__ = ["GROUP_BITS", "StrangerError", "group_id", "hash62"]

#: Bits of a group id. Even among a million groups at the same time, two ids are equal only with probability 1e-7.
GROUP_BITS = 62


class StrangerError(ProtocolError):
    """Raised when a frame's sender is not in the frame's group: the frame may be of another group with the same id."""


def hash62(text: str) -> int:
    """Return a hash of `text` with 62 bits, equal on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def group_id(text: str) -> int:
    """Return a group's id: a hash of its description, equal on all ranks."""
    return hash62(text) & ((1 << GROUP_BITS) - 1)
