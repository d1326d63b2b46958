"""Errors as plain data in messages: the cause of a group's failure, and the errors that pending calls raise."""

from __future__ import annotations

from typing import Any

from aiocoll.engine.control.shapes import fit_text
from aiocoll.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    GroupRevokedError,
    PeerLostError,
    PeerProtocolError,
)

__all__ = ["cause_of", "error_from", "failure_by", "revocation"]

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
    """Encode an error as plain data for a control message."""
    return {
        "kind": type(error).__name__,
        "text": fit_text(str(error)),
        "op": error.op and fit_text(error.op),
        "seq": fit_text(error.seq) if isinstance(error.seq, str) else error.seq,
        "group": error.group and fit_text(error.group),
        "ranks": list(error.ranks),
        "how": getattr(error, "how", None),
    }


def revocation(identity: int, name: str, cause: GroupError) -> dict[str, Any]:
    """Return the control message that reports the failure of a group."""
    return {"t": "revoke", "g": identity, "name": fit_text(name), "cause": cause_of(cause)}


def failure_by(cause: GroupError) -> GroupError:
    """Return the error that one pending call raises after its group failed with `cause`: the same text and origin.

    On the rank where a user's function raised, the origin is that exception, with its traceback.
    """
    error = error_from(cause_of(cause))
    error.__cause__ = cause.__cause__ or cause
    return error


def error_from(cause: dict[str, Any]) -> GroupError:
    """Decode an error that `cause_of` has encoded."""
    kind = _CLASSES.get(cause["kind"], GroupError)
    fields = {"op": cause["op"], "seq": cause["seq"], "group": cause["group"], "ranks": cause["ranks"]}
    if kind is PeerLostError:
        fields["how"] = cause["how"]
    return kind(cause["text"], **fields)
