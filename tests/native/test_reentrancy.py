"""Native calls that run Python code, for instance finalizers; this code makes, finishes or hands over other calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, ProcessGroup
from aiocoll.native import core
from aiocoll.work import Work

from ..engine.test_slot_program import jobs
from ..internals import native_calls_of

pytestmark = pytest.mark.skipif(core is None, reason="needs the accelerator in C")

#: The number of calls that each rank makes in a test.
CALLS = 300


class Finalized:
    """A reference cycle that runs a function when the garbage collector frees the cycle."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.itself = self
        self.call = call

    def __del__(self) -> None:
        self.call()


@contextmanager
def frequent_collections() -> Iterator[None]:
    """Make the garbage collector run after every second new object."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(2, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def start_allreduce(pg: ProcessGroup, dtype: str) -> Work[Any]:
    """Start an allreduce of ones; with two ranks, all results are 2."""
    return pg.allreduce(np.full(4, 1, dtype))


@pytest.mark.parametrize("dtype", ["f8", "f2"])
@pytest.mark.parametrize("seed", range(4))
async def test_finalizer_can_make_and_hand_over_native_calls(dtype: str, seed: int) -> None:
    chance = random.Random(seed)
    async with jobs(2) as [pgs]:
        works: list[list[Work[Any]]] = [[], []]
        inside = False

        def use_calls() -> None:
            nonlocal inside
            if inside:
                return
            inside = True
            for pg, own_works in zip(pgs, works, strict=True):
                native, action = native_calls_of(pg), chance.randrange(6)
                if action == 0:
                    own_works.append(start_allreduce(pg, dtype))
                elif action == 1:
                    native.hand_over()
                elif action == 2:
                    native.look()
                elif action == 3:
                    native.copies()
                elif action == 4 and own_works:
                    repr(own_works[-1])
                elif action == 5:
                    native.relink()
            inside = False

        with frequent_collections():
            for _ in range(CALLS):
                for pg, own_works in zip(pgs, works, strict=True):
                    Finalized(use_calls)
                    own_works.append(start_allreduce(pg, dtype))
                if chance.random() < 0.2:
                    await asyncio.sleep(0)
        inside = True
        gc.collect()
        most = max(map(len, works))
        for pg, own_works in zip(pgs, works, strict=True):
            own_works += [start_allreduce(pg, dtype) for _ in range(most - len(own_works))]
        for own_works in works:
            for work in own_works:
                assert (await work).tolist() == [2.0] * 4
        numbers = [sorted(work._completion.seq or 0 for work in own_works) for own_works in works]
        assert numbers[0] == sorted(set(numbers[0])) == numbers[1]


@pytest.mark.parametrize("dtype", ["f8", "f2"])
@pytest.mark.parametrize("collected", range(0, 40, 3))
async def test_finalizer_can_abort_the_group_during_native_calls(dtype: str, collected: int) -> None:
    async with jobs(2) as [pgs]:
        works: list[Work[Any]] = []
        count = 0

        def use_calls() -> None:
            nonlocal count
            count += 1
            if count == collected:
                pgs[0].abort("by a finalizer")

        with frequent_collections():
            for _ in range(60):
                for pg in pgs:
                    Finalized(use_calls)
                    with contextlib.suppress(GroupError):
                        works.append(start_allreduce(pg, dtype))
                if not len(works) % 7:
                    await asyncio.sleep(0)
        for work in works:
            with contextlib.suppress(GroupError):
                await asyncio.wait_for(work, 10)
        assert all(work.done() for work in works)


async def test_accelerator_keeps_a_waiting_call_until_the_peer_calls() -> None:
    async with jobs(2) as [pgs]:
        work = start_allreduce(pgs[0], "f8")
        assert native_calls_of(pgs[0]).count == 1
        assert start_allreduce(pgs[1], "f8").done()
        assert (await work).tolist() == [2.0] * 4


async def test_await_that_started_before_a_handover_completes() -> None:
    class StartedAwait:
        def __init__(self, work: Work[Any]) -> None:
            self.iterator: Any = work.__await__()

        def __await__(self) -> Any:
            return self.iterator

    async def await_started(started: StartedAwait) -> Any:
        return await started

    async with jobs(2) as [pgs]:
        started = StartedAwait(start_allreduce(pgs[0], "f8"))
        native_calls_of(pgs[0]).hand_over()
        task = asyncio.create_task(await_started(started))
        await asyncio.sleep(0)
        start_allreduce(pgs[1], "f8")
        assert (await task).tolist() == [2.0] * 4
