"""Reference counts and memory after native calls, handovers to Python, and refused calls.

The tests count the references of all reachable objects. A debug interpreter also has a total, which misses references
that NumPy counts itself. So the tests compare this total only for calls that run no Python. The arrays are made before
the counting, because `numpy.zeros` without a dtype leaks a reference to the dtype (NumPy 2.4).
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.journal import HISTORY
from aiocoll.work import Work

from ..internals import is_native, native_calls_of
from .groups import group_of_ranks
from .test_wrong_arguments import make_common_lane, make_steps

#: The number of repetitions that are measured, and of earlier repetitions that fill the call history.
TURNS, WARM = 400, HISTORY + 300
#: The minimum reference count of objects that an extension module has made immortal.
IMMORTAL = 10**8

Arrays = dict[str, Any]
Ranks = list[tuple[ProcessGroup, Arrays]]


def arrays() -> Arrays:
    return {
        "x": np.zeros(4),
        "one": np.zeros(1),
        "half": np.zeros(4, np.float16),
        "whole": np.zeros(8),
        "other": np.zeros(8),
        "list": [np.zeros(4), np.zeros(4)],
        "large": np.zeros(20_000),
        "five": np.zeros(5),
    }


#: Calls for which the method of the group is implemented in C, so that no Python code runs.
STRAIGHT: dict[str, Callable[[ProcessGroup, Arrays], Work[Any]]] = {
    "allreduce": lambda pg, a: pg.allreduce(a["x"]),
    "one number": lambda pg, a: pg.allreduce(a["one"]),
    "broadcast": lambda pg, a: pg.broadcast(a["x"], 0),
    "reduce": lambda pg, a: pg.reduce(a["x"], 1),
    "reduce_scatter_tensor": lambda pg, a: pg.reduce_scatter_tensor(a["x"], a["whole"]),
    "alltoall_base": lambda pg, a: pg.alltoall_base(a["whole"], a["other"]),
}
NATIVE = STRAIGHT | {
    "large": lambda pg, a: pg.allreduce(a["large"]),
    "large broadcast": lambda pg, a: pg.broadcast(a["large"], 0),
    "half precision": lambda pg, a: pg.allreduce(a["half"]),
    "key": lambda pg, a: pg.allreduce(a["x"], key="key"),
    "own timeout": lambda pg, a: pg.allreduce(a["x"], timeout=50),
    "scan": lambda pg, a: pg.scan(a["x"]),
    "barrier": lambda pg, a: pg.barrier(),
    "allgather_into_tensor": lambda pg, a: pg.allgather_into_tensor(a["whole"], a["x"]),
    "allgather": lambda pg, a: pg.allgather(a["list"], a["x"]),
}
PYTHON: dict[str, Callable[[ProcessGroup, Arrays], Work[Any]]] = {
    "short timeout": lambda pg, a: pg.allreduce(a["x"], timeout=0.4),
    "large half precision": lambda pg, a: pg.allreduce(a["large"].view(np.float16)),
    "number": lambda pg, a: pg.allreduce(1.0),
    "no outputs": lambda pg, a: pg.allgather(None, a["x"]),
}


async def hand_over_calls(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    works = [zero.allreduce(a["x"]), zero.allreduce(a["x"], key="key")]
    native_calls_of(zero).hand_over()
    await asyncio.gather(one.allreduce(b["x"]), one.allreduce(b["x"], key="key"), *works)


async def inspect_works(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    works = zero.allreduce(a["x"]), zero.allreduce(a["one"])
    repr(works[0])
    works[1].add_done_callback(lambda work: None)
    await asyncio.wait([one.allreduce(b["x"]), one.allreduce(b["one"]), *works])


async def copy_statistics(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    work = zero.allreduce(a["x"])
    zero.stats()
    await one.allreduce(b["x"])
    await work
    await work


async def cancel_await(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    work = zero.allreduce(a["x"])
    task = asyncio.ensure_future(work.join())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await one.allreduce(b["x"])
    await work


async def call_with_hooks(ranks: Ranks) -> None:
    handles = [pg.add_hook(Hook()) for pg, _ in ranks]
    await asyncio.gather(*(pg.allreduce(a["x"]) for pg, a in ranks))
    for handle in handles:
        handle.remove()


class Hook:
    def on_end(self, info: Any) -> None:
        pass


async def call_in_block(ranks: Ranks) -> None:
    async def block(pg: ProcessGroup, a: Arrays) -> None:
        async with pg.coalescing():
            pg.allreduce(a["x"])
            pg.allgather_into_tensor(a["whole"], a["five"][:4])
            pg.allreduce(a["large"])

    await asyncio.gather(*(block(pg, each) for pg, each in ranks))


async def make_wrong_calls(ranks: Ranks) -> None:
    (zero, a), _ = ranks
    native = native_calls_of(zero)
    for call in (
        lambda: zero.allreduce(a["x"], "SUM"),  # type: ignore[arg-type]
        lambda: zero.broadcast(a["x"], 2),
        lambda: zero.allreduce(a["x"], key=1),  # type: ignore[arg-type]
        lambda: zero.alltoall_base(a["x"], a["five"]),
        lambda: native.one("allreduce"),
        lambda: native.parts("allgather"),
        lambda: native.start(None),
        lambda: native.hand_over("all"),
        lambda: make_steps(first=((7, 16, (1,), 0, 0, 1),)),
        lambda: make_steps(moves=((1, 0),)),
        lambda: make_common_lane(nbytes=64),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    make_steps()
    make_common_lane().close()


OTHERS: dict[str, Callable[[Ranks], Awaitable[None]]] = {
    each.__name__.replace("_", " "): each
    for each in (
        hand_over_calls,
        inspect_works,
        copy_statistics,
        cancel_await,
        call_with_hooks,
        call_in_block,
        make_wrong_calls,
    )
}


def count_references() -> tuple[int, int]:
    """Return the total number of references to all reachable objects, and the number of allocated memory blocks."""
    gc.collect()
    objects = gc.get_objects()
    reachable = {id(each): each for each in objects} | {id(each): each for each in gc.get_referents(*objects)}
    return sum(n for n in map(sys.getrefcount, reachable.values()) if n < IMMORTAL), sys.getallocatedblocks()


async def check_no_growth(
    turn: Callable[[], Awaitable[None]], turns: int = TURNS, warm: int = WARM, allowed: float = 0.5
) -> int:
    """Check that repetitions leave no references and no memory; return the growth of `sys.gettotalrefcount()`.

    A leak grows in each of several rounds. Caches and free lists stop growing when they are full.
    """

    async def run_turns(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            await turn()
        return *count_references(), getattr(sys, "gettotalrefcount", int)()

    await run_turns(warm)
    before = await run_turns(10)
    for _ in range(5):
        after = await run_turns(turns)
        references, blocks, total = (now - then for now, then in zip(after, before, strict=True))
        if max(references, blocks) < turns * allowed:
            break
        before = after
    else:
        pytest.fail(f"{turns} turns left {references} references and {blocks} memory blocks")
    return total


def turn_of(call: Callable[[ProcessGroup, Arrays], Work[Any]], ranks: Ranks) -> Callable[[], Awaitable[None]]:
    async def turn() -> None:
        first, second = (call(pg, each) for pg, each in ranks)
        await first
        await second

    return turn


@pytest.mark.parametrize("name", NATIVE | PYTHON)
async def test_native_calls_leave_no_references(name: str) -> None:
    call = (NATIVE | PYTHON)[name]
    async with group_of_ranks([True, True]) as pgs:
        ranks = [(pg, arrays()) for pg in pgs]
        works = [call(pg, each) for pg, each in ranks]
        assert all(map(is_native, works)) is (name in NATIVE)
        await asyncio.gather(*works)
        del works
        grown = await check_no_growth(turn_of(call, ranks))
        assert name not in STRAIGHT or abs(grown) < TURNS / 2


@pytest.mark.parametrize("name", OTHERS)
async def test_handed_over_and_refused_native_calls_leave_no_references(name: str) -> None:
    async with group_of_ranks([True, True]) as pgs:
        ranks = [(pg, arrays()) for pg in pgs]
        await check_no_growth(lambda: OTHERS[name](ranks), turns=100)


async def test_closed_native_groups_leave_no_references() -> None:
    """Use a wider limit than for calls, since a group has thousands of references and free lists keep some objects."""
    made = arrays()["list"]

    async def turn() -> None:
        async with group_of_ranks([True, True], "closed") as pgs:
            await asyncio.gather(*(pg.allreduce(array) for pg, array in zip(pgs, made, strict=True)))

    await check_no_growth(turn, turns=10, warm=10, allowed=50)
