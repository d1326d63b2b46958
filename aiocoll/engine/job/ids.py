"""Names as integers that are the same on all ranks."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["GROUP_BITS", "group_id", "hash62"]

#: Bits of a group id. Of a million groups that exist at the same time, two have the same id with probability 1e-7.
GROUP_BITS = 62


def hash62(text: str) -> int:
    """Hash `text` to 62 bits, the same on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def group_id(text: str) -> int:
    """Hash the description of a group to its id, the same on all ranks."""
    return hash62(text) & ((1 << GROUP_BITS) - 1)
