"""Commands that change one key, as functions from the old value to the new value, for all stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from aiocoll.errors import StoreError
from aiocoll.store.commands import MAX_INTEGER, MAX_VALUE_BYTES

__all__ = ["UPDATES", "Update"]

#: The effect of a command: whether the value changes, the new value (None removes the key), and the result.
Update = tuple[bool, bytes | None, Any]


def _set(key: str, old: bytes | None, value: bytes) -> Update:
    return True, value, None


def _add(key: str, old: bytes | None, amount: int) -> Update:
    number = b"0" if old is None else old
    try:
        total = int(number) + amount
    except ValueError:
        raise StoreError(f"add: key {key!r} holds {number[:40]!r}, which is not a decimal number") from None
    if abs(total) > MAX_INTEGER:
        raise StoreError(f"add: the sum under key {key!r} does not fit 64 bits")
    return True, b"%d" % total, total


def _append(key: str, old: bytes | None, more: bytes) -> Update:
    whole = (old or b"") + more
    if len(whole) > MAX_VALUE_BYTES:
        raise StoreError(f"append: key {key!r} would hold {len(whole)} bytes, the limit is {MAX_VALUE_BYTES}")
    return True, whole, None


def _compare_set(key: str, old: bytes | None, expected: bytes, desired: bytes) -> Update:
    if old == expected or (old is None and not expected):
        return True, desired, desired
    return False, old, expected if old is None else old


def _delete_key(key: str, old: bytes | None) -> Update:
    return old is not None, None, old is not None


#: The function of each command. It receives the key, the value (None if absent) and the command's other arguments.
UPDATES: Final[Mapping[str, Callable[..., Update]]] = MappingProxyType(
    {
        "set": _set,
        "add": _add,
        "append": _append,
        "compare_set": _compare_set,
        "hold": _compare_set,
        "delete_key": _delete_key,
    }
)
