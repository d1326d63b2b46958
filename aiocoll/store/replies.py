"""Checks of a store server's replies, which a client makes before it uses a reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

from aiocoll.errors import ProtocolError
from aiocoll.store.commands import WAITS

__all__ = ["ReplyStatus", "check_reply"]


class ReplyStatus(IntEnum):
    """The kind of a reply: a result, an error, or the keys that were missing at a timeout."""

    RESULT = 0
    ERROR = 1
    MISSING = 2


def check_reply(command: str, arguments: tuple[Any, ...], outcome: Any, payload: Any) -> tuple[ReplyStatus, Any]:
    """Check the reply to a request, and return its status and payload.

    Raises:
        ProtocolError: the reply is not valid for this request.
    """
    if type(outcome) is not int or outcome not in _OUTCOMES:
        raise ProtocolError(f"unknown outcome {outcome!r:.40} in the reply to {command}")
    if outcome == ReplyStatus.MISSING:
        fits = command in _WAITS and _is_list(payload, str)
    elif outcome == ReplyStatus.ERROR:
        fits = type(payload) is str
    else:
        fits = _RESULTS[command](payload) and (command != "multi_get" or len(payload) == len(arguments[0]))
    if not fits:
        raise ProtocolError(f"{ReplyStatus(outcome).name} {payload!r:.40} is not a valid reply to {command}")
    return ReplyStatus(outcome), payload


def _is_list(payload: Any, kind: type) -> bool:
    return type(payload) is list and all(type(item) is kind for item in payload)


def _is_none(payload: Any) -> bool:
    return payload is None


def _is_bool(payload: Any) -> bool:
    return type(payload) is bool


def _is_int(payload: Any) -> bool:
    return type(payload) is int


def _is_bytes(payload: Any) -> bool:
    return type(payload) is bytes


_OUTCOMES = frozenset(map(int, ReplyStatus))
_WAITS = frozenset({*WAITS, "join"})
_RESULTS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "set": _is_none,
    "add": _is_int,
    "compare_set": _is_bytes,
    "hold": _is_bytes,
    "check": _is_bool,
    "delete_key": _is_bool,
    "num_keys": _is_int,
    "append": _is_none,
    "multi_set": _is_none,
    "list_keys": lambda payload: _is_list(payload, str),
    "queue_push": _is_none,
    "queue_return": _is_none,
    "queue_len": _is_int,
    "queue_take": lambda payload: payload is None or _is_bytes(payload),
    "get": _is_bytes,
    "multi_get": lambda payload: _is_list(payload, bytes),
    "wait": _is_none,
    "join": _is_none,
    "queue_pop": _is_bytes,
}
