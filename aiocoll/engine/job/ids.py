"""Names as integers that are the same on all ranks."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["hash62"]


def hash62(text: str) -> int:
    """Hash `text` to 62 bits, the same on all ranks."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
