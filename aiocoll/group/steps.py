"""A call that is several operations, one after the other, under one work: what comes next hangs on what came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Program
from aiocoll.elements.dtypes import by_name
from aiocoll.engine.operations.base import KEYED, Operation, Signature
from aiocoll.engine.operations.offload import Counted, revoke_after_error
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.group.launch import Launcher
from aiocoll.group.planning import keep
from aiocoll.work import GOES_ON, Work

__all__ = ["Steps"]

_INT64 = by_name("int64")


class Steps:
    """One call on one rank. Each step is an operation of its own, under an id that follows from the call's.

    Args:
        group: whose call it is.
        terms: what the ranks must agree on, and what error messages say of all steps.
        shape: of the caller's main array.
        limit: seconds for all of them.
        work: handed from one step to the next.
        identity: the call's id.

    Attributes:
        _counts: a number of each rank, once they have been counted.
    """

    def __init__(
        self, group: Launcher, terms: Signature, shape: tuple[int, ...], limit: float, work: Work[Any], identity: int
    ) -> None:
        self._group = group
        self._member = group._member
        self._terms = terms
        self._shape = shape
        self._limit = limit
        self._work = work
        self._identity = identity
        self._counts = np.zeros(group._size, np.int64)
        self._first: Operation
        self._last: Operation

    def _count(self, mine: Callable[[], int], then: Callable[[], Any], long: bool = False) -> Operation:
        """Return the first step, in which all ranks learn a number of each.

        Args:
            mine: finds this rank's.
            then: called when `_counts` has all.
            long: whether `mine` takes a thread.
        """
        first = Counted(
            self._member,
            self._identity,
            self._counting_plan(),
            self._shape,
            self._work,
            self._limit,
            self._counts,
            mine,
            long=long,
        )
        self._work._unwrap = self._guarded(then)
        self._first = self._last = first
        return first

    def _counting_plan(self) -> Plan:
        group, terms = self._group, self._terms
        if (found := group._plans.get(terms)) is None:
            plan = group._plan("allgather", _INT64, ((1,) * group._size,))
            program = Program(plan.program, plan.scratch, plan.algorithm)
            found = keep(group._plans, terms, (Plan(terms, program, _INT64, None, ProgramExecutor), None))
        return found[0]

    def _carry_out(self, step: str, plan: Plan, arrays: list[NDArray[Any] | None], then: Callable[[], Any]) -> Any:
        """Go on with a collective."""
        operation = plan.executor(
            self._member, self._id(step), plan, arrays, self._shape, None, self._work, self._left()
        )
        operation.terms = self._terms  # error messages are about the user's call
        return self._enter(operation, then)

    def _enter(self, operation: Operation, then: Callable[[], Any]) -> Any:
        self._work._unwrap = self._guarded(then)
        self._last = operation
        self._member.enter(operation)
        # The timeout is the whole call's, and so is what messages say of it.
        operation.entered = self._first.entered
        operation.timeout = self._limit
        operation.warned = self._first.warned
        return GOES_ON

    def _left(self) -> float:
        """Return the seconds left; of the group's own timeout all, since the engine counts it from `entered`."""
        if self._limit == self._member.default_timeout:
            return self._limit
        return max(self._first.entered + self._limit - self._member.endpoint.runtime.time(), 0.0)

    def _id(self, step: str) -> int:
        # Keys are hashed with their count behind them: no key gives this.
        return KEYED | self._member.endpoint.hash62(f"{self._identity}\0{step}\0step")

    def _guarded(self, then: Callable[[], Any]) -> Callable[[], Any]:
        """Let the group know when a step cannot be taken here: the others would wait for it."""

        def go_on() -> Any:
            try:
                return then()
            except Exception as error:
                raise revoke_after_error(self._last, error) from error

        return go_on
