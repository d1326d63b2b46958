"""Long calculations of an operation, run in a thread so that they do not block the event loop.

The operation stays in flight meanwhile. If it fails, the thread's result is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiocoll.engine.operations.base import Operation
from aiocoll.user_code import contain

__all__ = ["run_in_thread"]

T = TypeVar("T")


def run_in_thread(operation: Operation, task: Callable[[], T], then: Callable[[T], object]) -> None:
    """Call `task` in a thread, then call `then` with the result on the event loop.

    `then` is not called if the operation has failed by then.
    """
    comm = operation.comm
    if not comm.runtime.may_thread:
        try:
            result = task()
        except Exception as error:
            comm.revoke_after_error(operation, error)
        else:
            then(result)
        return

    def ended(future: asyncio.Future[T]) -> None:
        error = None if future.cancelled() else future.exception()
        if operation.done or future.cancelled():
            return
        if error is not None:
            comm.revoke_after_error(operation, contain(error))
        else:
            then(future.result())

    comm.runtime.loop.run_in_executor(None, task).add_done_callback(ended)
