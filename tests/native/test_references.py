"""Calls, hand-overs and refusals leave no references behind.

What is counted are the references that objects have. The total of a debug interpreter lacks those that NumPy takes and
returns by itself, so it is looked at only for calls that go from the group's method to C. Arrays are made before:
`numpy.zeros` without a dtype keeps a reference to it (NumPy 2.4).
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

from ..internals import is_native, native_of
from .groups import group_of_ranks
from .test_wrong_arguments import common, steps

#: Turns that are counted, and calls before them, after which the history is full, of numbers that do not always exist.
TURNS, WARM = 400, HISTORY + 300
#: References of objects that extension modules give so many of them to keep them.
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


#: Calls that run in C; those of the first table go there from the group's method.
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


async def handed_over(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    works = [zero.allreduce(a["x"]), zero.allreduce(a["x"], key="key")]
    native_of(zero).hand_over()
    await asyncio.gather(one.allreduce(b["x"]), one.allreduce(b["x"], key="key"), *works)


async def looked_into(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    works = zero.allreduce(a["x"]), zero.allreduce(a["one"])
    repr(works[0])
    works[1].add_done_callback(lambda work: None)
    await asyncio.wait([one.allreduce(b["x"]), one.allreduce(b["one"]), *works])


async def copied(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    work = zero.allreduce(a["x"])
    zero.stats()
    await one.allreduce(b["x"])
    await work
    await work


async def cancelled(ranks: Ranks) -> None:
    (zero, a), (one, b) = ranks
    work = zero.allreduce(a["x"])
    task = asyncio.ensure_future(work.join())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await one.allreduce(b["x"])
    await work


async def hooked(ranks: Ranks) -> None:
    handles = [pg.add_hook(Hook()) for pg, _ in ranks]
    await asyncio.gather(*(pg.allreduce(a["x"]) for pg, a in ranks))
    for handle in handles:
        handle.remove()


class Hook:
    def on_end(self, info: Any) -> None:
        pass


async def coalesced(ranks: Ranks) -> None:
    async def block(pg: ProcessGroup, a: Arrays) -> None:
        async with pg.coalescing():
            pg.allreduce(a["x"])
            pg.allgather_into_tensor(a["whole"], a["five"][:4])
            pg.allreduce(a["large"])

    await asyncio.gather(*(block(pg, each) for pg, each in ranks))


async def refused(ranks: Ranks) -> None:
    (zero, a), _ = ranks
    native = native_of(zero)
    for call in (
        lambda: zero.allreduce(a["x"], "SUM"),  # type: ignore[arg-type]
        lambda: zero.broadcast(a["x"], 2),
        lambda: zero.allreduce(a["x"], key=1),  # type: ignore[arg-type]
        lambda: zero.alltoall_base(a["x"], a["five"]),
        lambda: native.one("allreduce"),
        lambda: native.parts("allgather"),
        lambda: native.start(None),
        lambda: native.hand_over("all"),
        lambda: steps(first=((7, 16, (1,), 0, 0, 1),)),
        lambda: steps(moves=((1, 0),)),
        lambda: common(nbytes=64),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    steps()
    common().close()


OTHERS: dict[str, Callable[[Ranks], Awaitable[None]]] = {
    each.__name__.replace("_", " "): each
    for each in (handed_over, looked_into, copied, cancelled, hooked, coalesced, refused)
}


def count() -> tuple[int, int]:
    """Return the references of all objects that can be reached, and the blocks of memory."""
    gc.collect()
    objects = gc.get_objects()
    reachable = {id(each): each for each in objects} | {id(each): each for each in gc.get_referents(*objects)}
    return sum(n for n in map(sys.getrefcount, reachable.values()) if n < IMMORTAL), sys.getallocatedblocks()


async def check(turn: Callable[[], Awaitable[None]], turns: int = TURNS, warm: int = WARM, allowed: float = 0.5) -> int:
    """Check that turns leave nothing behind; return by how much a debug interpreter's total has grown.

    A leak grows in each of several looks; caches and free lists, which fill, do not.
    """

    async def take(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            await turn()
        return *count(), getattr(sys, "gettotalrefcount", int)()

    await take(warm)
    before = await take(10)
    for _ in range(5):
        after = await take(turns)
        references, blocks, total = (now - then for now, then in zip(after, before, strict=True))
        if max(references, blocks) < turns * allowed:
            break
        before = after
    else:
        pytest.fail(f"in {turns} turns, there are {references} more references and {blocks} more blocks")
    return total


def one_call(call: Callable[[ProcessGroup, Arrays], Work[Any]], ranks: Ranks) -> Callable[[], Awaitable[None]]:
    async def turn() -> None:
        first, second = (call(pg, each) for pg, each in ranks)
        await first
        await second

    return turn


@pytest.mark.parametrize("name", NATIVE | PYTHON)
async def test_calls_leave_no_references(name: str) -> None:
    call = (NATIVE | PYTHON)[name]
    async with group_of_ranks([True, True]) as pgs:
        ranks = [(pg, arrays()) for pg in pgs]
        works = [call(pg, each) for pg, each in ranks]
        assert all(map(is_native, works)) is (name in NATIVE)
        await asyncio.gather(*works)
        del works
        grown = await check(one_call(call, ranks))
        assert name not in STRAIGHT or abs(grown) < TURNS / 2


@pytest.mark.parametrize("name", OTHERS)
async def test_handed_over_and_refused_calls_leave_no_references(name: str) -> None:
    async with group_of_ranks([True, True]) as pgs:
        ranks = [(pg, arrays()) for pg in pgs]
        await check(lambda: OTHERS[name](ranks), turns=100)


async def test_groups_leave_no_references() -> None:
    """A group has thousands of references; free lists may take a few of each."""
    made = arrays()["list"]

    async def turn() -> None:
        async with group_of_ranks([True, True], "closed") as pgs:
            await asyncio.gather(*(pg.allreduce(array) for pg, array in zip(pgs, made, strict=True)))

    await check(turn, turns=10, warm=10, allowed=50)
