"""Calculations on the way of a collective that would hold the event loop for long: they are made in a thread.

The operation is in flight meanwhile, as at any other time: it can fail, and what its thread finds out is dropped then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.operations.base import Operation, Signature
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.errors import GroupError
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Counted", "Offload", "revoke_after_error"]


class Offload(Operation):
    """A step without messages.

    Args:
        task: what is to be calculated; it touches nothing that the loop touches before it has returned.
    """

    __slots__ = ("_task",)

    def __init__(
        self,
        group: Communicator,
        identity: int,
        terms: Signature,
        shape: tuple[int, ...],
        work: Work[Any],
        timeout: float,
        task: Callable[[], object],
    ) -> None:
        super().__init__(group, identity, terms.fingerprint(), terms, shape, work, timeout)
        self._task = task

    def enter(self) -> None:
        """Start the thread."""
        _in_thread(self, self._task, lambda: self.succeed(None))

    def needs(self, peer: int) -> bool:
        """No peer is needed."""
        return False


class Counted(ProgramExecutor):
    """An allgather of one number per rank, which this rank may have to find out first.

    Args:
        counts: what is gathered: one int64 per rank, in rank order.
        count: finds this rank's number.
        long: whether that takes a thread.
    """

    __slots__ = ("_count", "_long", "_mine")

    def __init__(
        self,
        group: Communicator,
        identity: int,
        plan: Plan,
        shape: tuple[int, ...],
        work: Work[Any],
        timeout: float,
        counts: NDArray[np.int64],
        count: Callable[[], int],
        long: bool,
    ) -> None:
        self._mine = np.zeros(1, np.int64)
        arrays: list[NDArray[Any] | None] = [counts[rank : rank + 1] for rank in range(len(counts))]
        super().__init__(group, identity, plan, [*arrays, self._mine], shape, None, work, timeout)
        self._count = count
        self._long = long

    def enter(self) -> None:
        """Send the number when it is known; those of the others are taken at any time."""
        if self._long:
            _in_thread(self, self._find, super().enter)
        else:
            self._find()
            super().enter()

    def _find(self) -> None:
        self._mine[0] = self._count()


def revoke_after_error(operation: Operation, error: BaseException) -> GroupError:
    """Say on all ranks that a calculation of this one failed; return the cause of the group's end."""
    group, name = operation.group, operation.work.key or operation.work.seq
    cause = GroupError(
        f"{operation.work.op} (sequence {name!r}) of group {group.name!r} failed on rank {group.rank}: "
        f"{type(error).__name__}: {error}",
        op=operation.work.op,
        seq=name,
        group=group.name,
        ranks=[group.rank],
    )
    cause.__cause__ = error
    # What has ended was one step of a collective, which has not: it counts as unfinished.
    group.pending[operation] = None
    group.revoke(cause)
    group.pending.pop(operation, None)
    return cause


def _in_thread(operation: Operation, task: Callable[[], object], then: Callable[[], object]) -> None:
    """Call `task` in a thread, and `then` on the loop if the operation has not failed by then."""
    endpoint = operation.group.endpoint
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
