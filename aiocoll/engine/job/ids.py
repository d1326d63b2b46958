"""Names as integers that are the same on all ranks."""

from __future__ import annotations

from hashlib import blake2b

from aiocoll.errors import ProtocolError

__all__ = ["GROUP_BITS", "StrangerError", "group_id", "hash62"]

#: Bits of a group id. Of a million groups that exist at the same time, two have the same id with probability 1e-7.
GROUP_BITS = 62


class StrangerError(ProtocolError):
    """A rank is not in the group of its frame; it may be in another group of the same id."""


def hash62(text: str) -> int:
    """Hash `text` to 62 bits, the same on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def group_id(text: str) -> int:
    """Hash the description of a group to its id, the same on all ranks."""
    return hash62(text) & ((1 << GROUP_BITS) - 1)
