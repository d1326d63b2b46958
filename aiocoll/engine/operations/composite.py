"""Composite operations: a parent operation and the child operations that carry it out.

The ids of children are derived from the id of their parent, so they are the same on all ranks. Frames refer to the
children. The log, timeouts, reports and hooks refer to the parent. The parent ends when its children have ended. If the
parent fails, its children fail, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiocoll.completion import Completion
from aiocoll.engine.job.ids import hash62
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import KEYED

__all__ = ["ChildCompletion", "Children", "Ended", "Make"]

#: A function that creates an operation from its id and its completion.
Make = Callable[[int, Completion], Operation]
#: A callback for the end of a child operation, with its result and its error.
Ended = Callable[[Any, BaseException | None], None]


class ChildCompletion(Completion):
    """The completion of a child operation, which reports its outcome to the parent operation."""

    __slots__ = ("_report",)

    def __init__(self, parent: Completion, report: Ended) -> None:
        self.init_child(parent)
        self._report = report

    def finish(self, result: Any, exception: BaseException | None = None) -> None:
        """Finish the child operation, and report its outcome to the parent."""
        super().finish(result, exception)
        self._report(result, exception)


class Children:
    """The running child operations of one parent operation. When the parent fails, it calls `fail`.

    The operation refers to this object. This object does not refer to the operation.
    """

    __slots__ = ("_running", "algorithm")

    def __init__(self) -> None:
        self._running: dict[Operation, None] = {}
        #: The algorithm of the most recently started child.
        self.algorithm: str | None = None

    def start(self, parent: Operation, name: str, make: Make, ended: Ended, *, reported: bool = False) -> None:
        """Create a child operation, and start it.

        Args:
            parent: the parent operation.
            name: must be unique among the children, and the same on all ranks. The child's id is a hash of the name. No
                key has the same hash input, since keys are hashed with their count, after a zero byte.
            make: creates the child.
            ended: called at the end of the child, unless the parent has already ended.
            reported: if True, stall reports and expiry refer to the child instead of the parent until the child ends.
        """
        child = self.add(parent, KEYED | hash62(name), make, ended, reported=reported)
        self.enter(parent, child)
        if reported:
            child.entered = parent.entered

    def enter(self, parent: Operation, child: Operation) -> None:
        """Put a child operation in flight."""
        parent.comm.enter(child)
        parent.root.started = child.entered

    def record_start(self, parent: Operation, algorithm: str | None, now: float) -> None:
        """Record that the C accelerator has started child operations."""
        self.algorithm = algorithm
        parent.root.started = now

    def add(self, parent: Operation, identity: int, make: Make, ended: Ended, *, reported: bool = False) -> Operation:
        """Create a child operation without starting it.

        `identity` is the child's id. The other arguments are those of `start`.
        """
        #: A list that holds the child until its end. Without this indirection, the child and its completion would form
        #: a reference cycle.
        running: list[Operation] = []

        def report(result: Any, error: BaseException | None) -> None:
            child = running.pop()
            self._running.pop(child, None)
            if reported:
                parent.warned, parent.reported = child.warned, child.reported
            if not parent.done:
                if child.waited_for >= 0:
                    parent.set_waited_for(child.waited_for)
                ended(result, error)
                parent.set_waited_for(-1)

        child = make(identity, ChildCompletion(parent.completion, report))
        running.append(child)
        child.parent = parent
        self.algorithm = child.algorithm()
        speaker, silent = (child, parent) if reported else (parent, child)
        speaker.warned = parent.warned
        silent.suppress_reports()
        self._running[child] = None
        return child

    def fail(self, error: BaseException) -> None:
        """Fail all running child operations, because the parent has failed."""
        running, self._running = self._running, {}
        for child in running:
            child.fail(error)

    def first(self) -> Operation | None:
        """Return the child operation that has run longest; None if no child is running."""
        return next(iter(self._running), None)

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose data for any running child has not arrived."""
        return sorted({rank for child in self._running for rank in child.awaited_ranks()})

    def find_waiting_for_device(self) -> Operation | None:
        """Return a child operation that waits only for a device of this rank; None if there is none."""
        return next((child for child in self._running if child.is_waiting_for_device()), None)

    def __bool__(self) -> bool:
        return bool(self._running)
