"""Incremental decoding of objects: each callback decodes for a short time, so that the event loop stays responsive."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from aiocoll.engine.operations.base import Operation
from aiocoll.runtime import BUDGET

__all__ = ["Steps", "carry_on", "run_to_end"]

#: A generator that decodes step by step and returns the result. Each step takes a fraction of `BUDGET`.
Steps = Generator[None, None, Any]


def carry_on(operation: Operation, steps: Steps) -> None:
    """Run the generator `steps` for at most `BUDGET` seconds; finish `operation` with the generator's result.

    If steps are left, `advance` must continue them in the next loop iteration.
    """
    ticks = operation.comm.runtime.ticks
    deadline = ticks() + BUDGET
    try:
        while True:
            next(steps)
            if ticks() >= deadline:
                operation.schedule_advance()
                return
    except StopIteration as end:
        result = end.value
    except Exception as error:  # decoding another rank's bytes, or a user's unpickling code, can raise any exception
        operation.fail(error)
        return
    operation.succeed(result)


def run_to_end(steps: Steps) -> Any:
    """Run the generator `steps` to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
