"""Long calculations of a collective, moved to a thread so that they do not block the event loop.

The operation stays in flight meanwhile: it can fail, and the result of its thread is dropped then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.signature import Signature
from aiocoll.user_code import contain
from aiocoll.work import Work

__all__ = ["Offload", "in_thread"]


class Offload(Operation):
    """A step without messages, calculated in a thread.

    Args:
        task: the calculation; the loop must not use its data before it has returned.
    """

    __slots__ = ("_task",)

    def __init__(
        self, comm: Group, identity: int, signature: Signature, task: Callable[[], object], work: Work[Any]
    ) -> None:
        super().__init__(comm, identity, signature, signature.fingerprint(), work)
        self._task = task

    def enter(self) -> None:
        """Start the thread."""
        in_thread(self, self._task, lambda: self.succeed(None))

    def needs(self, peer: int) -> bool:
        """No peer is needed."""
        return False


def in_thread(operation: Operation, task: Callable[[], object], then: Callable[[], object]) -> None:
    """Call `task` in a thread, and `then` on the loop if the operation has not failed by then."""
    comm = operation.comm
    if not comm.runtime.may_thread:
        try:
            task()
        except Exception as error:
            comm.broke(operation, error)
        else:
            then()
        return

    def ended(future: asyncio.Future[object]) -> None:
        error = None if future.cancelled() else future.exception()
        if operation.done or future.cancelled():
            return
        if error is not None:
            comm.broke(operation, contain(error))
        else:
            then()

    comm.runtime.loop.run_in_executor(None, task).add_done_callback(ended)
