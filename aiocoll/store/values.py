"""What commands make of the value under a key; None is an absent key."""

from __future__ import annotations

from aiocoll.errors import StoreError
from aiocoll.store.commands import MAX_INTEGER, MAX_VALUE_BYTES

__all__ = ["added", "appended", "matches"]


def added(key: str, value: bytes | None, amount: int) -> int:
    """Return the sum of a decimal number and `amount`; raises `StoreError` if it is none, or does not fit."""
    number = b"0" if value is None else value
    try:
        total = int(number) + amount
    except ValueError:
        raise StoreError(f"add: key {key!r} holds {number[:40]!r}, which is no decimal number") from None
    if abs(total) > MAX_INTEGER:
        raise StoreError(f"add: the sum under key {key!r} does not fit 64 bits")
    return total


def appended(key: str, value: bytes | None, more: bytes) -> bytes:
    """Return `value` with `more` behind it; raises `StoreError` if that is over the limit."""
    whole = (value or b"") + more
    if len(whole) > MAX_VALUE_BYTES:
        raise StoreError(f"append: key {key!r} would hold {len(whole)} bytes, the limit is {MAX_VALUE_BYTES}")
    return whole


def matches(value: bytes | None, expected: bytes) -> bool:
    """Whether `compare_set` stores: an absent key matches an empty `expected`."""
    return value == expected or (value is None and not expected)
