"""Native calls while Python code that they run makes, ends and hands over other calls."""

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
from .test_lifetime import native_of

pytestmark = pytest.mark.skipif(core is None, reason="needs the accelerator in C")

#: Calls of each rank in a test.
CALLS = 300


class Finalized:
    """Garbage that makes a call when it is collected."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.itself = self
        self.call = call

    def __del__(self) -> None:
        self.call()


@contextmanager
def collections() -> Iterator[None]:
    """Collect garbage with every other object that is made."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(2, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def start(pg: ProcessGroup, dtype: str) -> Work[Any]:
    """Start an allreduce, which gives 2 everywhere."""
    return pg.allreduce(np.full(4, 1, dtype))


@pytest.mark.parametrize("dtype", ["f8", "f2"])
@pytest.mark.parametrize("seed", range(4))
async def test_finalizer_may_make_and_hand_over_calls(dtype: str, seed: int) -> None:
    chance = random.Random(seed)
    async with jobs(2) as [pgs]:
        works: list[list[Work[Any]]] = [[], []]
        inside = False

        def act() -> None:
            nonlocal inside
            if inside:
                return
            inside = True
            for pg, mine in zip(pgs, works, strict=True):
                native, what = native_of(pg), chance.randrange(6)
                if what == 0:
                    mine.append(start(pg, dtype))
                elif what == 1:
                    native.hand_over()
                elif what == 2:
                    native.look()
                elif what == 3:
                    native.copies()
                elif what == 4 and mine:
                    repr(mine[-1])
                elif what == 5:
                    native.relink()
            inside = False

        with collections():
            for _ in range(CALLS):
                for pg, mine in zip(pgs, works, strict=True):
                    Finalized(act)
                    mine.append(start(pg, dtype))
                if chance.random() < 0.2:
                    await asyncio.sleep(0)
        inside = True
        gc.collect()
        most = max(map(len, works))
        for pg, mine in zip(pgs, works, strict=True):
            mine += [start(pg, dtype) for _ in range(most - len(mine))]
        for mine in works:
            for work in mine:
                assert (await work).tolist() == [2.0] * 4
        numbers = [sorted(work._completion.seq or 0 for work in mine) for mine in works]
        assert numbers[0] == sorted(set(numbers[0])) == numbers[1]


@pytest.mark.parametrize("dtype", ["f8", "f2"])
@pytest.mark.parametrize("collected", range(0, 40, 3))
async def test_finalizer_may_fail_the_group(dtype: str, collected: int) -> None:
    async with jobs(2) as [pgs]:
        works: list[Work[Any]] = []
        count = 0

        def act() -> None:
            nonlocal count
            count += 1
            if count == collected:
                pgs[0].abort("by a finalizer")

        with collections():
            for _ in range(60):
                for pg in pgs:
                    Finalized(act)
                    with contextlib.suppress(GroupError):
                        works.append(start(pg, dtype))
                if not len(works) % 7:
                    await asyncio.sleep(0)
        for work in works:
            with contextlib.suppress(GroupError):
                await asyncio.wait_for(work, 10)
        assert all(work.done() for work in works)


async def test_call_stays_native_until_the_peer_calls() -> None:
    async with jobs(2) as [pgs]:
        work = start(pgs[0], "f8")
        assert native_of(pgs[0]).count == 1
        assert start(pgs[1], "f8").done()
        assert (await work).tolist() == [2.0] * 4


async def test_await_that_precedes_a_handover_ends() -> None:
    class Begun:
        def __init__(self, work: Work[Any]) -> None:
            self.iterator: Any = work.__await__()

        def __await__(self) -> Any:
            return self.iterator

    async def awaited(begun: Begun) -> Any:
        return await begun

    async with jobs(2) as [pgs]:
        begun = Begun(start(pgs[0], "f8"))
        native_of(pgs[0]).hand_over()
        task = asyncio.create_task(awaited(begun))
        await asyncio.sleep(0)
        start(pgs[1], "f8")
        assert (await task).tolist() == [2.0] * 4
