"""Calls that are implemented as generators of steps: results, errors, and the close of the generator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupError, GroupOptions, ProcessGroup, ReduceOp, testing
from aiocoll.completion import Completion
from aiocoll.elements.dtypes import by_name
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.stepped import StepGenerator, SteppedOperation, calculate_in_thread, collective, exchange
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.work import Work

from ..internals import dispatcher_of
from ..ranks import LINKS, parametrize_transports, run_ranks, wait_until

INT64 = by_name("int64")
Steps = Callable[[Dispatcher], StepGenerator[Any]]


def start(pg: ProcessGroup, steps: Steps, timeout: float = 60.0) -> Work[Any]:
    """Start a call made of `steps`."""
    d = dispatcher_of(pg)
    signature = Signature("STEPS", "int64", (), None, None)
    plan = d.plans.counting_plan(signature)

    def make(identity: int, completion: Completion) -> SteppedOperation:
        return SteppedOperation(d.comm, identity, plan, steps(d), completion)

    return d.start(FactoryCall(signature, make, timeout))


def add(d: Dispatcher, name: str, values: np.ndarray) -> StepGenerator[None]:
    """Return a step that sums `values` over all ranks, in place."""
    plan = d.plans.plan("allreduce", INT64, (len(values),), op=ReduceOp.SUM)
    return collective(name, plan, [values])


@pytest.mark.ranks(1, 2, 3)
@parametrize_transports(*LINKS)
async def test_step_of_a_call_receives_the_results_of_earlier_steps(pg: ProcessGroup) -> None:
    def steps(d: Dispatcher) -> StepGenerator[list[int]]:
        first = yield from calculate_in_thread(lambda: d.rank + 1)
        numbers = yield from exchange(first)
        values = np.full(3, int(numbers.sum()))
        yield from add(d, "one", values)
        doubled = yield from calculate_in_thread(lambda: 2 * values)
        yield from add(d, "two", doubled)
        return [int(each) for each in doubled]

    p = pg.size()
    works = [start(pg, steps) for _ in range(3)]
    for work in works:
        assert await work == [p * (p + 1) // 2 * p * 2 * p] * 3
    assert pg.pending() == []


@pytest.mark.parametrize("place", ["before the exchange", "after it", "in a thread", "after a collective"])
async def test_step_error_on_one_rank_fails_the_call_on_all_ranks(place: str) -> None:
    ended: list[int] = []

    async def one(pg: ProcessGroup) -> None:
        def broken() -> None:
            if pg.rank() == 1:
                raise MemoryError("no room")

        def steps(d: Dispatcher) -> StepGenerator[None]:
            try:
                if place == "before the exchange":
                    broken()
                yield from exchange(0)
                if place == "after it":
                    broken()
                if place == "in a thread":
                    yield from calculate_in_thread(broken)
                yield from add(d, "one", np.zeros(2, np.int64))
                if place == "after a collective":
                    broken()
                yield from add(d, "two", np.zeros(2, np.int64))
            finally:
                ended.append(d.rank)

        with pytest.raises(GroupError, match="failed on rank 1: MemoryError: no room"):
            await start(pg, steps)
        assert pg.pending() == []

    await run_ranks(3, one)
    assert sorted(ended) == [0, 1, 2]


async def test_failed_call_closes_the_generator_of_its_steps() -> None:
    """Fail a call while a step runs in a thread; the generator must not continue with the result of this thread."""
    held, begun, closed, continued = threading.Event(), [], [], []

    async def one(pg: ProcessGroup) -> None:
        def wait() -> None:
            begun.append(pg.rank())
            assert held.wait(20)

        def steps(d: Dispatcher) -> StepGenerator[None]:
            try:
                yield from exchange(0)
                if d.rank == 0:
                    yield from calculate_in_thread(wait)
                    continued.append(d.rank)
                yield from add(d, "one", np.zeros(2, np.int64))
            except GeneratorExit:
                closed.append(d.rank)
                raise

        work = start(pg, steps)
        await wait_until(lambda: begun)
        if pg.rank() == 1:
            pg.abort("on purpose")
        with pytest.raises(GroupError, match="on purpose"):
            await work
        assert pg.rank() in closed
        await pg.shutdown()
        held.set()

    await run_ranks(2, one)
    assert sorted(closed) == [0, 1]
    assert continued == []


async def test_long_calculation_is_not_blamed_on_other_ranks() -> None:
    """Check that the timeout error names no ranks, since the other ranks have finished the call."""
    held = threading.Event()

    async def one(pg: ProcessGroup) -> None:
        def steps(d: Dispatcher) -> StepGenerator[None]:
            yield from exchange(0)
            if d.rank == 0:
                yield from calculate_in_thread(lambda: held.wait(20))

        work = start(pg, steps, timeout=0.4)
        if pg.rank() == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"did not complete within 0\.4 s") as raised:
                await work
            assert raised.value.ranks == ()
            held.set()
        else:
            await work
            await pg.wait_revoked()

    await run_ranks(2, one)


async def test_later_step_that_waits_for_a_long_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    held = threading.Event()

    def is_logged() -> bool:
        return any("called as STEPS" in each.getMessage() for each in caplog.records)

    async def one(pg: ProcessGroup) -> None:
        def steps(d: Dispatcher) -> StepGenerator[None]:
            yield from exchange(0)
            yield from add(d, "one", np.zeros(2, np.int64))
            if d.rank == 1:
                yield from calculate_in_thread(lambda: held.wait(20))
            yield from add(d, "two", np.zeros(2, np.int64))

        work = start(pg, steps)
        if pg.rank() == 0:
            await wait_until(is_logged)
            held.set()
        await work

    with caplog.at_level(logging.WARNING, "aiocoll"):
        await testing.run_ranks(2, one, options=GroupOptions(warn_after=0.3))
