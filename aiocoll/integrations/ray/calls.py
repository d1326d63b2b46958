"""Calls of Ray actor methods, and the classification of their errors."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from aiocoll.errors import GroupRevokedError, PeerLostError

__all__ = ["call_actor", "cause_of", "check_actor", "is_loss"]


def check_actor(actor: Any, name: str) -> Any:
    """Check that `actor` is a Ray actor that can be a rank, and return it; errors contain `name`."""
    if not hasattr(actor, "aiocoll_state"):
        raise TypeError(f"{name} must be the handle of an actor whose class derives from Member or BlockingMember")
    return actor


async def call_actor(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor, and return its result; a cancellation also cancels an async method."""
    reference = getattr(actor, method).remote(*args)
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that an actor's method raised, which Ray wraps in `RayTaskError`."""
    found: BaseException = error.cause if isinstance(error, RayTaskError) else error
    return found


def is_loss(error: BaseException) -> bool:
    """Return whether an error of an actor's method was caused by the loss of a rank."""
    cause = cause_of(error)
    lost = isinstance(cause, PeerLostError) and cause.how != "left"
    return lost or isinstance(cause, (RayActorError, GroupRevokedError))
