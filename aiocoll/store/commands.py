"""The commands every store understands, and the checks of their arguments.

A command is a name and a tuple of arguments. `StoreCore` applies it, `FileStore` logs it and `TCPStore` sends it, so
the arguments are described once, here, by one letter each.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from aiocoll.errors import StoreError

__all__ = [
    "COMMANDS",
    "LEFT",
    "LEFT_SUFFIX",
    "MAX_ENTRIES",
    "MAX_TOTAL_BYTES",
    "MAX_VALUE_BYTES",
    "OF_CONNECTIONS",
    "WAITS",
    "check_arguments",
    "check_request",
    "count_bytes",
    "keys_of",
    "prefixed",
]

#: Bytes of a key in UTF-8; keys are names, and they are repeated in every error message.
MAX_KEY_BYTES: Final = 1024
#: Bytes of one value: a store is for meeting, arrays are sent by a group.
MAX_VALUE_BYTES: Final = 8 << 20
#: Keys and queued items together.
MAX_ENTRIES: Final = 1 << 16
#: Bytes of all values together, so that a faulty rank cannot use up the memory of the store's host.
MAX_TOTAL_BYTES: Final = 256 << 20
#: Counters are 64-bit, as msgpack's integers are.
MAX_INTEGER: Final = (1 << 63) - 1

#: Value of a key that a client held until it disconnected.
LEFT: Final = b"left"

#: Ends the name of the key that is then set, too: a list of keys shows at once which clients have left.
LEFT_SUFFIX: Final = "/left"

#: `hold` does what `compare_set` does; a server replaces the value by `LEFT` when the client disconnects.
#:
#: Answered at once. k: key, K: keys, v: value, V: values, i: integer, p: prefix of keys.
COMMANDS: Final = MappingProxyType(
    {
        "set": "kv",
        "add": "ki",
        "compare_set": "kvv",
        "hold": "kvv",
        "check": "K",
        "delete_key": "k",
        "num_keys": "p",
        "append": "kv",
        "multi_set": "KV",
        "list_keys": "p",
        "queue_push": "kv",
        "queue_return": "kv",
        "queue_len": "k",
        "queue_take": "k",
    }
)

#: Answered once the keys exist (`queue_pop`: once the queue has an item).
WAITS: Final = MappingProxyType({"get": "k", "multi_get": "K", "wait": "K", "queue_pop": "k"})

#: For a server only. c: number of clients. They wait for that many clients, and cancel a request.
OF_CONNECTIONS: Final = MappingProxyType({"join": "c", "cancel": ""})


def check_arguments(command: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a command that no store could carry out.

    Raises:
        TypeError, ValueError: a wrong argument.
        StoreError: a key or value over its limit, or no such command.
    """
    _check(COMMANDS.get(command) or WAITS.get(command), command, arguments)


def check_request(command: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a request that a server cannot carry out; raises as `check_arguments` does."""
    if command in OF_CONNECTIONS:
        _check(OF_CONNECTIONS[command], command, arguments)
    else:
        check_arguments(command, arguments)


def _check(kinds: str | None, command: str, arguments: tuple[Any, ...]) -> None:
    if kinds is None or len(kinds) != len(arguments):
        raise StoreError(f"no store command {command!r} with {len(arguments)} arguments")
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind in "kp":
            _check_key(argument)
        elif kind == "v":
            _check_value(argument)
        elif kind == "i":
            _check_integer(argument)
        elif kind == "c":
            _check_count(argument)
        else:
            _check_list(kind, argument)
    if kinds == "KV" and len(arguments[0]) != len(arguments[1]):
        raise ValueError(f"{command} got {len(arguments[0])} keys and {len(arguments[1])} values: one value per key")


def keys_of(arguments: tuple[Any, ...]) -> list[str]:
    """Return the keys (or the queue) that a wait is for."""
    return arguments[0] if isinstance(arguments[0], list) else [arguments[0]]


def prefixed(prefix: str, command: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `arguments` with `prefix` before every key."""
    kinds = COMMANDS.get(command) or WAITS[command]
    return tuple(
        prefix + argument if kind in "kp" else [prefix + key for key in argument] if kind == "K" else argument
        for kind, argument in zip(kinds, arguments, strict=True)
    )


def _check_key(key: object) -> None:
    if type(key) is str and len(key) <= MAX_KEY_BYTES and key.isascii():
        return  # fast path: a thousand ranks that meet send a million keys
    if not isinstance(key, str):
        raise TypeError(f"key must be str, got {type(key).__name__}")
    nbytes = count_bytes("key", key)
    if nbytes > MAX_KEY_BYTES:
        raise StoreError(f"key {key[:40]!r}... has {nbytes} bytes, the limit is {MAX_KEY_BYTES}: use a shorter name")


def count_bytes(name: str, text: str) -> int:
    """Return how many bytes `text`, the argument `name`, has in UTF-8.

    Raises:
        ValueError: it has a lone surrogate.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name}={text[:40]!r} is no text: it has a lone surrogate, which UTF-8 cannot hold") from None


def _check_value(value: object) -> None:
    if not isinstance(value, bytes):
        raise TypeError(f"value must be bytes, got {type(value).__name__}: use bytes(value)")
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(
            f"value has {len(value)} bytes, the limit is {MAX_VALUE_BYTES}: send arrays through a group, not the store"
        )


def _check_integer(amount: object) -> None:
    if not isinstance(amount, int):
        raise TypeError(f"amount must be int, got {type(amount).__name__}")
    if abs(amount) > MAX_INTEGER:
        raise ValueError(f"amount {amount} does not fit 64 bits")


def _check_count(count: object) -> None:
    if type(count) is not int or not 0 < count <= MAX_ENTRIES:
        raise ValueError(f"world size {count!r} must be from 1 to {MAX_ENTRIES}")


def _check_list(kind: str, items: object) -> None:
    name = "keys" if kind == "K" else "values"
    if not isinstance(items, list):
        raise TypeError(f"{name} must be a list, got {type(items).__name__}")
    for item in items:
        (_check_key if kind == "K" else _check_value)(item)
