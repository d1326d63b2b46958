"""A call that runs as several operations, one after the other, each chosen by the results of those before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Children, Make
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.offload import Offload, in_thread
from aiocoll.engine.operations.operation_log import SIGNATURE
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.work import Work

__all__ = ["Stepped"]


class Stepped(ProgramExecutor):
    """One rank's part in such a call. First all ranks exchange one number each; the other steps are its children.

    Args:
        plan: of an allgather of one int64 per rank, with the signature of the call.

    Attributes:
        counts: the number of each rank, set before `_go_on` is called.
    """

    __slots__ = ("_children", "_is_counted", "_mine", "counts")

    def __init__(self, comm: Group, identity: int, plan: Plan, work: Work[Any]) -> None:
        self.counts: NDArray[np.int64] = np.zeros(len(comm.ranks), np.int64)
        self._mine = np.zeros(1, np.int64)
        arrays: list[NDArray[Any] | None] = [self.counts[rank : rank + 1] for rank in range(len(comm.ranks))]
        super().__init__(comm, identity, plan, [*arrays, self._mine], work)
        self._children = Children()
        self._is_counted = False

    def enter(self) -> None:
        """Send this rank's number when it is known; the others' are accepted at any time."""
        if self._is_long():
            in_thread(self, self._find, super().enter)
        else:
            self._find()
            super().enter()

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived."""
        return self._children.awaited() if self._children else super().awaited()

    def expire(self) -> None:
        """The timeout has passed: the running step knows which ranks have not entered it."""
        step = self._children.first()
        if step is None:
            super().expire()
        else:
            step.expire()

    def fail(self, error: BaseException) -> None:
        """End with `error`, and fail the running step, too."""
        super().fail(error)
        self._children.fail(error)

    def _count(self) -> int:
        """Return this rank's number."""
        raise NotImplementedError

    def _is_long(self) -> bool:
        """Whether `_count` has to run in a thread."""
        return False

    def _go_on(self) -> None:
        """Start the next step, or end."""
        raise NotImplementedError

    def _find(self) -> None:
        self._mine[0] = self._count()

    def _complete(self) -> None:
        if self._is_counted:
            return
        self._is_counted = True
        self._give_back_scratch()
        self._attempt(self._go_on)

    # -- steps

    def _carry_out(self, step: str, plan: Plan, arrays: list[NDArray[Any] | None], then: Callable[[], None]) -> None:
        """Continue with a collective."""
        self._next(step, lambda identity, work: plan.executor(self.comm, identity, plan, arrays, work), then)

    def _calculate(self, step: str, task: Callable[[], None], then: Callable[[], None]) -> None:
        """Continue with a calculation in a thread."""
        self._next(step, lambda identity, work: Offload(self.comm, identity, self.signature, task, work), then)

    def _next(self, step: str, make: Make, then: Callable[[], None]) -> None:
        def named(identity: int, work: Work[Any]) -> Operation:
            operation = make(identity, work)
            operation.signature = self.entry[SIGNATURE]  # messages refer to the call, as other ranks are told it
            return operation

        def ended(_: Any, error: BaseException | None) -> None:
            if error is None:
                self._attempt(then)
            else:
                self.fail(error)

        self._children.start(self, f"{self.id}\0{step}\0step", named, ended, reported=True)

    def _attempt(self, then: Callable[[], None]) -> None:
        """Revoke the group if a step cannot be run here: the other ranks would wait for it."""
        try:
            then()
        except Exception as error:
            self.comm.broke(self, error)
