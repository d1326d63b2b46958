"""Incremental decoding of objects: each callback does a part, so that the loop stays responsive."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from aiocoll.engine.operations.base import Operation
from aiocoll.runtime import BUDGET

__all__ = ["Steps", "at_once", "carry_on"]

#: A generator that returns the result; each step takes a fraction of `BUDGET`.
Steps = Generator[None, None, Any]


def carry_on(operation: Operation, steps: Steps) -> None:
    """Run some of `steps`, and end `operation` with their result; `advance` continues in the next turn."""
    ticks = operation.comm.runtime.ticks
    deadline = ticks() + BUDGET
    try:
        while True:
            next(steps)
            if ticks() >= deadline:
                operation.put_off()
                return
    except StopIteration as end:
        result = end.value
    except Exception as error:  # decoding a rank's bytes, or a custom unpickling, may fail in any way
        operation.fail(error)
        return
    operation.succeed(result)


def at_once(steps: Steps) -> Any:
    """Run all of `steps`, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
