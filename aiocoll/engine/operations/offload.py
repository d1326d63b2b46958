"""Calculations on the way of a collective that would hold the event loop for long: they are made in a thread.

The operation is in flight meanwhile, as at any other time: it can fail, and what its thread finds out is dropped then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiocoll.engine.operations.base import Operation, Signature
from aiocoll.errors import GroupError
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Offload", "in_thread", "revoke_after_error"]


class Offload(Operation):
    """A step without messages.

    Args:
        task: what is to be calculated; it touches nothing that the loop touches before it has returned.
    """

    __slots__ = ("_task",)

    def __init__(
        self, comm: Communicator, identity: int, terms: Signature, task: Callable[[], object], work: Work[Any]
    ) -> None:
        super().__init__(comm, identity, terms, terms.fingerprint(), work)
        self._task = task

    def enter(self) -> None:
        """Start the thread."""
        in_thread(self, self._task, lambda: self.succeed(None))

    def needs(self, peer: int) -> bool:
        """No peer is needed."""
        return False


def in_thread(operation: Operation, task: Callable[[], object], then: Callable[[], object]) -> None:
    """Call `task` in a thread, and `then` on the loop if the operation has not failed by then."""
    endpoint = operation.comm.endpoint
    if not endpoint.runtime.may_thread:
        task()
        then()
        return

    def ended(future: asyncio.Future[object]) -> None:
        error = None if future.cancelled() else future.exception()
        if operation.done or future.cancelled():
            return
        if error is not None:
            revoke_after_error(operation, error)
        else:
            then()

    endpoint.loop.run_in_executor(None, task).add_done_callback(ended)


def revoke_after_error(operation: Operation, error: BaseException) -> None:
    """Say on all ranks that a calculation of this one failed."""
    comm, name = operation.comm, operation.work.key or operation.work.seq
    cause = GroupError(
        f"{operation.work.op} (sequence {name!r}) of group {comm.name!r} failed on rank {comm.rank}: "
        f"{type(error).__name__}: {error}",
        op=operation.work.op,
        seq=name,
        group=comm.name,
        ranks=[comm.rank],
    )
    cause.__cause__ = error
    comm.revoke(cause)
