"""Composite operations: a parent that a call has started, and children that carry it out.

The ids of children are derived from their parent's, so they are the same on all ranks. Frames refer to the children;
the log, timeouts, reports and hooks refer to the parent. It ends when its children have ended, and fails them when it
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiocoll.completion import Completion
from aiocoll.engine.job.ids import hash62
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import KEYED

__all__ = ["ChildCompletion", "Children", "Ended", "Make"]

#: Makes an operation from its id and its completion.
Make = Callable[[int, Completion], Operation]
#: Called with the result and the error of a child that has ended.
Ended = Callable[[Any, BaseException | None], None]


class ChildCompletion(Completion):
    """The completion of a child: reports its outcome to the parent."""

    __slots__ = ("_report",)

    def __init__(self, parent: Completion, report: Ended) -> None:
        self.init_child(parent)
        self._report = report

    def finish(self, result: Any, exception: BaseException | None = None) -> None:
        """End the child, and report that to the parent."""
        super().finish(result, exception)
        self._report(result, exception)


class Children:
    """The children of one operation, which calls `fail` when it fails; it has them, and they do not keep it."""

    __slots__ = ("_running", "algorithm")

    def __init__(self) -> None:
        self._running: dict[Operation, None] = {}
        #: The algorithm of the child that was started last.
        self.algorithm: str | None = None

    def start(self, parent: Operation, name: str, make: Make, ended: Ended, *, reported: bool = False) -> None:
        """Start a child.

        Args:
            parent: whose.
            name: the child's id is a hash of it: unique, and the same on all ranks. No key has the same hash input,
                since keys are hashed with their count, after a zero byte.
            make: makes it.
            ended: called at its end, unless the parent has ended before.
            reported: until its end, stall reports and expiry refer to it in place of the parent.
        """
        child = self.add(parent, KEYED | hash62(name), make, ended, reported=reported)
        self.enter(parent, child)
        if reported:
            child.entered = parent.entered

    def enter(self, parent: Operation, child: Operation) -> None:
        """Put a child in flight."""
        parent.comm.enter(child)
        parent.root.started = child.entered

    def note_start(self, parent: Operation, algorithm: str | None, now: float) -> None:
        """Note that children start that the accelerator carries out."""
        self.algorithm = algorithm
        parent.root.started = now

    def add(self, parent: Operation, identity: int, make: Make, ended: Ended, *, reported: bool = False) -> Operation:
        """Return a child that has not started; the arguments are as of `start`, but for its id."""
        #: The child until its end: it would keep itself, and its arrays, by what its completion reports to.
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
        silent.silence()
        self._running[child] = None
        return child

    def fail(self, error: BaseException) -> None:
        """Fail all running children: the parent has failed."""
        running, self._running = self._running, {}
        for child in running:
            child.fail(error)

    def first(self) -> Operation | None:
        """Return the child that has run longest; None if none is running."""
        return next(iter(self._running), None)

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived."""
        return sorted({rank for child in self._running for rank in child.awaited()})

    def hanging(self) -> Operation | None:
        """Return a child that only waits for a device of this rank, if there is one."""
        return next((child for child in self._running if child.hangs_here()), None)

    def __bool__(self) -> bool:
        return bool(self._running)
