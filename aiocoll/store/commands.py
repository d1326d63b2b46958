"""Commands of all stores, and the checks of their arguments.

A command is a name and a tuple of arguments. `StoreCore` applies it, `FileStore` logs it and `TCPStore` sends it. The
tables of this module describe each argument by one letter.
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
    "SERVER_COMMANDS",
    "WAITS",
    "add_prefix",
    "check_arguments",
    "check_request",
    "count_bytes",
    "keys_of",
]

#: Maximum bytes of a key in UTF-8. Keys are short names, because error messages repeat them.
MAX_KEY_BYTES: Final = 1024
#: Maximum bytes of a value. Stores are for the rendezvous; arrays are sent through groups.
MAX_VALUE_BYTES: Final = 8 << 20
#: Maximum number of keys and queued items together.
MAX_ENTRIES: Final = 1 << 16
#: Maximum bytes of all values together, so that a faulty rank cannot use up the memory of the store's host.
MAX_TOTAL_BYTES: Final = 256 << 20
#: Largest absolute value of a counter: signed 64 bits, like the integers of msgpack.
MAX_INTEGER: Final = (1 << 63) - 1

#: Value of a key that a client has set by the command `hold`, after that client has disconnected.
LEFT: Final = b"left"

#: Suffix of a second key, set together with the value `LEFT`. So a list of keys shows which clients have disconnected.
LEFT_SUFFIX: Final = "/left"

#: Commands that return at once, with argument types. k: key, K: keys, v: value, V: values, i: integer, p: key prefix.
#:
#: `hold` is a `compare_set` whose value the server replaces by `LEFT` when the client disconnects.
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

#: Commands that wait until the keys exist. `queue_pop` waits until the queue has an item.
WAITS: Final = MappingProxyType({"get": "k", "multi_get": "K", "wait": "K", "queue_pop": "k"})

#: Commands that only a server carries out: `join` waits for a number of clients (c), `cancel` cancels a request.
SERVER_COMMANDS: Final = MappingProxyType({"join": "c", "cancel": ""})


def check_arguments(command: str, arguments: tuple[Any, ...]) -> None:
    """Check the arguments of a store command.

    Raises:
        TypeError, ValueError: an argument is invalid.
        StoreError: a key or value exceeds its limit, or the command does not exist.
    """
    _check(COMMANDS.get(command) or WAITS.get(command), command, arguments)


def check_request(command: str, arguments: tuple[Any, ...]) -> None:
    """Check the arguments of a request that a server has received, as `check_arguments` does."""
    if command in SERVER_COMMANDS:
        _check(SERVER_COMMANDS[command], command, arguments)
    else:
        check_arguments(command, arguments)


def _check(kinds: str | None, command: str, arguments: tuple[Any, ...]) -> None:
    if kinds is None or len(kinds) != len(arguments):
        raise StoreError(f"unknown store command {command!r} with {len(arguments)} arguments")
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
    """Return the keys, or the queue, for which a waiting command with these arguments waits."""
    return arguments[0] if isinstance(arguments[0], list) else [arguments[0]]


def add_prefix(prefix: str, command: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `arguments` with `prefix` before every key."""
    kinds = COMMANDS.get(command) or WAITS[command]
    return tuple(
        prefix + argument if kind in "kp" else [prefix + key for key in argument] if kind == "K" else argument
        for kind, argument in zip(kinds, arguments, strict=True)
    )


def _check_key(key: object) -> None:
    if type(key) is str and len(key) <= MAX_KEY_BYTES and key.isascii():
        return  # the usual case, checked fast: a rendezvous of a thousand ranks sends a million keys
    if not isinstance(key, str):
        raise TypeError(f"key must be str, got {type(key).__name__}")
    nbytes = count_bytes("key", key)
    if nbytes > MAX_KEY_BYTES:
        raise StoreError(f"key {key[:40]!r}... has {nbytes} bytes, the limit is {MAX_KEY_BYTES}: use a shorter name")


def count_bytes(name: str, text: str) -> int:
    """Return the number of UTF-8 bytes of `text`; `name` is the argument's name in errors.

    Raises:
        ValueError: `text` has a lone surrogate.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(
            f"{name}={text[:40]!r} is not valid text: it has a lone surrogate, which UTF-8 cannot encode"
        ) from None


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
