"""Calls of actor methods, and the classification of their errors."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from aiocoll.errors import GroupRevokedError, PeerLostError

__all__ = ["ask", "cause_of", "checked", "is_loss"]


def checked(actor: Any, name: str) -> Any:
    """Return the handle of an actor, after the check that it can be a rank; `name` is its name in the error."""
    if not hasattr(actor, "aiocoll_state"):
        raise TypeError(f"{name} must be the handle of an actor whose class derives from Member or BlockingMember")
    return actor


async def ask(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor; return its result. If this call is cancelled, also cancel an async method."""
    reference = getattr(actor, method).remote(*args)
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that an actor's method raised."""
    found: BaseException = error.cause if isinstance(error, RayTaskError) else error
    return found


def is_loss(error: BaseException) -> bool:
    """Return whether a call failed because a rank was lost."""
    cause = cause_of(error)
    lost = isinstance(cause, PeerLostError) and cause.how != "left"
    return lost or isinstance(cause, (RayActorError, GroupRevokedError))
