"""Errors as plain data: how the reason why a group has failed travels, and what its works fail with."""

from __future__ import annotations

from typing import Any

from aiocoll.engine.control.shapes import fitting
from aiocoll.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    GroupRevokedError,
    PeerLostError,
    PeerProtocolError,
)

__all__ = ["cause_of", "error_from", "failure_by"]

_CLASSES: dict[str, type[GroupError]] = {
    each.__name__: each
    for each in (
        CollectiveMismatchError,
        CollectiveTimeoutError,
        PeerLostError,
        PeerProtocolError,
        GroupRevokedError,
        GroupError,
    )
}


def cause_of(error: GroupError) -> dict[str, Any]:
    """Turn an error into plain data that travels."""
    return {
        "kind": type(error).__name__,
        "text": fitting(str(error)),
        "op": error.op and fitting(error.op),
        "seq": fitting(error.seq) if isinstance(error.seq, str) else error.seq,
        "group": error.group and fitting(error.group),
        "ranks": list(error.ranks),
        "how": getattr(error, "how", None),
    }


def failure_by(cause: GroupError) -> GroupError:
    """Return the error of one of the works that `cause` ends: it says the same, and comes from what that comes from.

    On the rank where a function of the user's has raised, that is what it has raised, with its traceback.
    """
    error = error_from(cause_of(cause))
    error.__cause__ = cause.__cause__ or cause
    return error


def error_from(cause: dict[str, Any]) -> GroupError:
    """Turn plain data back into an error of the same class."""
    kind = _CLASSES.get(cause["kind"], GroupError)
    fields = {"op": cause["op"], "seq": cause["seq"], "group": cause["group"], "ranks": cause["ranks"]}
    if kind is PeerLostError:
        fields["how"] = cause["how"]
    return kind(cause["text"], **fields)
