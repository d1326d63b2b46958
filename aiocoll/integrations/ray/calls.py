"""Calls of actors, and what their errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from aiocoll.errors import GroupRevokedError, PeerLostError

__all__ = ["all_ended", "all_right", "ask", "begun", "cause_of", "checked", "is_loss"]


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


def begun(doing: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begin a call. Its error may be looked at or not: another one may tell more."""
    task = asyncio.create_task(doing, name="aiocoll call of an actor")
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def all_ended(calls: list[asyncio.Task[Any]], failed: Callable[[int, BaseException], Awaitable[None]]) -> None:
    """Wait for all calls; `failed` is awaited for each that fails, so that the others do not wait for it."""
    pending = set(calls)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                if (error := call.exception()) is not None and pending:
                    await failed(calls.index(call), error)
    finally:
        for call in pending:
            call.cancel()


async def all_right(doing: Iterable[Awaitable[None]]) -> None:
    """Wait for all of it to end; raise the first error."""
    for result in await asyncio.gather(*doing, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def cause_of(error: BaseException) -> BaseException:
    """Return what was raised in an actor."""
    found: BaseException = error.cause if isinstance(error, RayTaskError) else error
    return found


def is_loss(error: BaseException) -> bool:
    """Whether a call failed since a rank is lost."""
    cause = cause_of(error)
    lost = isinstance(cause, PeerLostError) and cause.how != "left"
    return lost or isinstance(cause, (RayActorError, GroupRevokedError))
