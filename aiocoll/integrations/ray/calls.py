"""Calls of actors, and what their errors mean."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from aiocoll.errors import GroupRevokedError, PeerLostError

__all__ = ["ask", "cause_of", "checked", "is_loss"]


def checked(actor: Any, name: str) -> Any:
    """Return the handle of an actor that can be a rank; `name` is for the error of any other one."""
    if not hasattr(actor, "aiocoll_state"):
        raise TypeError(f"{name} is no handle of an actor whose class derives from Member or BlockingMember")
    return actor


async def ask(actor: Any, method: str, *args: Any) -> Any:
    """Call a method of an actor; one that is async is cancelled with this."""
    reference = getattr(actor, method).remote(*args)
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise


def cause_of(error: BaseException) -> BaseException:
    """Return what was raised in an actor."""
    found: BaseException = error.cause if isinstance(error, RayTaskError) else error
    return found


def is_loss(error: BaseException) -> bool:
    """Whether a call failed since a rank is lost."""
    cause = cause_of(error)
    lost = isinstance(cause, PeerLostError) and cause.how != "left"
    return lost or isinstance(cause, (RayActorError, GroupRevokedError))
