"""Calls that consist of several operations in sequence, written as a generator of steps.

Each step can use the results of earlier steps::

    def steps() -> StepGenerator[list[Any]]:
        counts = yield from exchange(len(source))
        blocks = yield from calculate_in_thread(lambda: allocate(counts))
        yield from collective("gather", plan_of(counts), [*blocks, source])
        return blocks

The operation drives the generator. It fails on all ranks if the generator raises, since the other ranks would wait for
this one. If the operation fails, it closes the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Children
from aiocoll.engine.operations.offload import run_in_thread
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Step", "StepGenerator", "SteppedOperation", "calculate_in_thread", "collective", "exchange"]

T = TypeVar("T")

#: A function that starts a step of an operation. The operation continues with the result of the step.
Step = Callable[["SteppedOperation"], None]
#: A generator that yields steps, receives their results, and returns the result of the call.
StepGenerator = Generator[Step, Any, T]


def exchange(number: int) -> StepGenerator[NDArray[np.int64]]:
    """Exchange one number per rank, and return the numbers in rank order.

    Every call has this step exactly once, before its collectives. It detects calls that differ between ranks.
    """
    numbers: NDArray[np.int64] = yield lambda operation: operation._exchange(number)
    return numbers


def collective(name: str, plan: Plan, arrays: list[NDArray[Any] | None]) -> StepGenerator[None]:
    """Run the collective of a plan on flat arrays. `name` must be unique within the call, and the same on all ranks."""
    yield lambda operation: operation._carry_out(name, plan, arrays)


def calculate_in_thread(task: Callable[[], T]) -> StepGenerator[T]:
    """Run a calculation in a thread, and return its result. Meanwhile, the event loop must not use its data."""
    result: T = yield lambda operation: run_in_thread(operation, task, operation._go_on)
    return result


class SteppedOperation(ProgramExecutor):
    """The operation of one rank in a stepped call: it exchanges numbers, and runs collectives as child operations.

    Args:
        plan: the plan of an allgather of one int64 per rank, with the signature of the call.
        steps: the generator of the call.
    """

    __slots__ = ("_children", "_is_counted", "_mine", "_numbers", "_steps")

    def __init__(
        self, comm: Communicator, identity: int, plan: Plan, steps: StepGenerator[Any], completion: Completion
    ) -> None:
        self._numbers: NDArray[np.int64] = np.zeros(len(comm.ranks), np.int64)
        self._mine = np.zeros(1, np.int64)
        arrays: list[NDArray[Any] | None] = [self._numbers[rank : rank + 1] for rank in range(len(comm.ranks))]
        super().__init__(comm, identity, plan, [*arrays, self._mine], completion)
        self._children = Children()
        self._is_counted = False
        self._steps = steps

    def enter(self) -> None:
        """Start the first step of the generator. The numbers of other ranks may arrive earlier or later."""
        self._go_on(None)

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose data for the running step has not arrived."""
        return self._children.awaited_ranks() if self._children else super().awaited_ranks()

    def expire(self) -> None:
        """Handle the expired timeout by expiring the running step, which knows the ranks that have not entered it."""
        step = self._children.first()
        if step is None:
            super().expire()
        else:
            step.expire()

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`, fail the running step, and close the generator."""
        super().fail(error)
        self._children.fail(error)
        self._steps.close()

    def _go_on(self, result: Any) -> None:
        """Resume the generator with the result of a step, and start the step that it yields next."""
        try:
            self._steps.send(result)(self)
        except StopIteration as end:
            self.succeed(end.value)
        except Exception as error:
            self.comm.revoke_after_error(self, error)

    def _exchange(self, number: int) -> None:
        self._mine[0] = number
        super().enter()

    def _complete(self) -> None:
        """Resume the generator with the numbers of all ranks."""
        if not self._is_counted:
            self._is_counted = True
            self._give_back_scratch()
            self._go_on(self._numbers)

    def _carry_out(self, name: str, plan: Plan, arrays: list[NDArray[Any] | None]) -> None:
        def make(identity: int, completion: Completion) -> Operation:
            operation = plan.executor(self.comm, identity, plan, arrays, completion)
            operation.signature = self.root.signature  # error messages show the user's call, as on the other ranks
            return operation

        def ended(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._go_on(result)
            else:
                self.fail(error)

        self._children.start(self, f"{self.id}\0{name}\0step", make, ended, reported=True)
