"""The valid answers to each request; a client checks answers before use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

from aiocoll.errors import ProtocolError
from aiocoll.store.commands import WAITS

__all__ = ["ReplyStatus", "check_reply"]


class ReplyStatus(IntEnum):
    """How a request ended."""

    RESULT = 0
    ERROR = 1
    MISSING = 2


def check_reply(command: str, arguments: tuple[Any, ...], outcome: Any, payload: Any) -> tuple[ReplyStatus, Any]:
    """Return outcome and payload of the reply to a request.

    Raises:
        ProtocolError: it is not a valid answer to this request.
    """
    if type(outcome) is not int or outcome not in _OUTCOMES:
        raise ProtocolError(f"unknown outcome {outcome!r:.40} in the answer to {command}")
    if outcome == ReplyStatus.MISSING:
        fits = command in _WAITS and _is_list(payload, str)
    elif outcome == ReplyStatus.ERROR:
        fits = type(payload) is str
    else:
        fits = _RESULTS[command](payload) and (command != "multi_get" or len(payload) == len(arguments[0]))
    if not fits:
        raise ProtocolError(f"{ReplyStatus(outcome).name} {payload!r:.40} is not a valid answer to {command}")
    return ReplyStatus(outcome), payload


def _is_list(payload: Any, kind: type) -> bool:
    return type(payload) is list and all(type(item) is kind for item in payload)


def _nothing(payload: Any) -> bool:
    return payload is None


def _truth(payload: Any) -> bool:
    return type(payload) is bool


def _integer(payload: Any) -> bool:
    return type(payload) is int


def _value(payload: Any) -> bool:
    return type(payload) is bytes


_OUTCOMES = frozenset(map(int, ReplyStatus))
_WAITS = frozenset({*WAITS, "join"})
_RESULTS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "set": _nothing,
    "add": _integer,
    "compare_set": _value,
    "hold": _value,
    "check": _truth,
    "delete_key": _truth,
    "num_keys": _integer,
    "append": _nothing,
    "multi_set": _nothing,
    "list_keys": lambda payload: _is_list(payload, str),
    "queue_push": _nothing,
    "queue_return": _nothing,
    "queue_len": _integer,
    "queue_take": lambda payload: payload is None or _value(payload),
    "get": _value,
    "multi_get": lambda payload: _is_list(payload, bytes),
    "wait": _nothing,
    "join": _nothing,
    "queue_pop": _value,
}
