"""Ranks that disagree: found on every rank within a second of the last call, named alike, and no array touched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupRevokedError, ProcessGroup, ReduceOp, Work
from aiocoll.testing.virtual import run_virtual

#: Seconds a frame takes at least and at most where the ranks have links in memory.
LATENCY = (0.0005, 0.02)
#: Elements on either side of each array, which no call may touch.
GUARD = 64
#: What the rank that disagrees fills its arrays with: larger than any sum of the others in every dtype.
MARK = 0x7E
#: The contract: seconds from the last call until every rank knows.
SOON = 1.0

Call = Callable[[ProcessGroup, "Memory"], Work[Any] | list[Work[Any]]]


class Memory:
    """Makes the arrays of one rank, each between guards, and tells what happened to them."""

    def __init__(self, rank: int, odd: bool) -> None:
        self._value = MARK if odd else rank + 1
        self._odd = odd
        self._made: list[tuple[np.ndarray, np.ndarray]] = []

    def array(self, count: int, dtype: str = "float64") -> np.ndarray:
        whole = np.full(count + 2 * GUARD, self._value, dtype)
        if self._odd:
            whole.view("uint8")[:] = MARK
        self._made.append((whole, whole.copy()))
        return whole[GUARD:-GUARD]

    def check(self, alone: bool) -> None:
        """Arrays are as they were; those who agree may have gone some way among themselves, unless `alone`."""
        for whole, before in self._made:
            if self._odd or alone:
                assert whole.tobytes() == before.tobytes()
            else:
                assert whole[:GUARD].tobytes() == before[:GUARD].tobytes()
                assert whole[-GUARD:].tobytes() == before[-GUARD:].tobytes()
                assert (np.abs(whole) < MARK).all()


def blocks(pg: ProcessGroup, m: Memory, count: int = 10, dtype: str = "float64") -> list[np.ndarray]:
    return [m.array(count, dtype) for _ in range(pg.size())]


#: One call of each kind, all with roots that exist with two ranks.
KINDS: dict[str, Call] = {
    "allreduce": lambda pg, m: pg.allreduce(m.array(10)),
    "reduce": lambda pg, m: pg.reduce(m.array(10), 0),
    "broadcast": lambda pg, m: pg.broadcast(m.array(10), 0),
    "scan": lambda pg, m: pg.scan(m.array(10)),
    "exscan": lambda pg, m: pg.exscan(m.array(10)),
    "barrier": lambda pg, m: pg.barrier(),
    "monitored_barrier": lambda pg, m: pg.monitored_barrier(),
    "allgather": lambda pg, m: pg.allgather(blocks(pg, m), m.array(10)),
    "gather": lambda pg, m: pg.gather(blocks(pg, m) if pg.rank() == 0 else None, m.array(10), 0),
    "scatter": lambda pg, m: pg.scatter(m.array(10), blocks(pg, m) if pg.rank() == 0 else None, 0),
    "reduce_scatter": lambda pg, m: pg.reduce_scatter(m.array(10), blocks(pg, m)),
    "alltoall": lambda pg, m: pg.alltoall(blocks(pg, m), blocks(pg, m)),
    "broadcast_object": lambda pg, m: pg.broadcast_object("a", 0),
    "allgather_object": lambda pg, m: pg.allgather_object("a"),
    "gather_object": lambda pg, m: pg.gather_object("a", 0),
    "scatter_object": lambda pg, m: pg.scatter_object(["a"] * pg.size(), 0),
    "alltoall_object": lambda pg, m: pg.alltoall_object(["a"] * pg.size()),
}


class Case(NamedTuple):
    """What most ranks call, what one calls instead, and how the error says in what they differ."""

    name: str
    fields: str
    most: Call
    odd: Call


def add_one(a: Any, b: Any, out: Any) -> None:
    np.add(a, b, out)


def subtract(a: Any, b: Any, out: Any) -> None:
    np.subtract(a, b, out)


def reducing(op: ReduceOp, key: str | None = None) -> Call:
    return lambda pg, m: pg.allreduce(m.array(10), op, key=key)


def in_order(*counts: int) -> Call:
    return lambda pg, m: [pg.allreduce(m.array(count)) for count in counts]


def counting(kind: str, count: int, dtype: str = "float64", key: str | None = None) -> Call:
    """Call `kind` with `count` elements."""
    calls: dict[str, Call] = {
        "allreduce": lambda pg, m: pg.allreduce(m.array(count, dtype), key=key),
        "reduce": lambda pg, m: pg.reduce(m.array(count, dtype), 1, key=key),
        "broadcast": lambda pg, m: pg.broadcast(m.array(count, dtype), 1, key=key),
        "scan": lambda pg, m: pg.scan(m.array(count, dtype), key=key),
        "exscan": lambda pg, m: pg.exscan(m.array(count, dtype), key=key),
        "allgather": lambda pg, m: pg.allgather(blocks(pg, m, count, dtype), m.array(count, dtype), key=key),
        "gather": lambda pg, m: pg.gather(
            blocks(pg, m, count, dtype) if pg.rank() == 1 else None, m.array(count, dtype), 1, key=key
        ),
        "scatter": lambda pg, m: pg.scatter(
            m.array(count, dtype), blocks(pg, m, count, dtype) if pg.rank() == 1 else None, 1, key=key
        ),
        "reduce_scatter": lambda pg, m: pg.reduce_scatter(m.array(count, dtype), blocks(pg, m, count, dtype), key=key),
        "alltoall": lambda pg, m: pg.alltoall(blocks(pg, m, count, dtype), blocks(pg, m, count, dtype), key=key),
    }
    return calls[kind]


SIZED = ("allreduce", "reduce", "broadcast", "scan", "exscan", "allgather", "reduce_scatter")
#: Only the two ends of a message know its length.
PRIVATE = ("gather", "scatter", "alltoall")
ROOTED: dict[str, Callable[[int], Call]] = {
    "reduce": lambda root: lambda pg, m: pg.reduce(m.array(10), root),
    "broadcast": lambda root: lambda pg, m: pg.broadcast(m.array(10), root),
    "gather": lambda root: lambda pg, m: pg.gather(blocks(pg, m) if pg.rank() == root else None, m.array(10), root),
    "scatter": lambda root: lambda pg, m: pg.scatter(m.array(10), blocks(pg, m) if pg.rank() == root else None, root),
    "broadcast_object": lambda root: lambda pg, m: pg.broadcast_object("a", root),
    "gather_object": lambda root: lambda pg, m: pg.gather_object("a", root),
    "scatter_object": lambda root: lambda pg, m: pg.scatter_object(["a"] * pg.size(), root),
}

TABLE = [
    *(Case(f"{a}-{b}", "op", KINDS[a], KINDS[b]) for a, b in pairwise([*KINDS, "allreduce"])),
    *(Case(f"dtype-{kind}", "dtype", counting(kind, 10), counting(kind, 10, "int64")) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"count-{kind}", "counts, shape", counting(kind, 10), counting(kind, 9)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"more-{kind}", "counts, shape", counting(kind, 10), counting(kind, 11)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"empty-{kind}", "counts, shape", counting(kind, 10), counting(kind, 0)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"full-{kind}", "counts, shape", counting(kind, 0), counting(kind, 10)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"root-{kind}", "root", call(0), call(1)) for kind, call in ROOTED.items()),
    Case("reduce-op", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.MAX)),
    Case("average", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.AVG)),
    Case("factor", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.PREMUL_SUM(1.0))),
    Case("custom", "reduce", reducing(ReduceOp.custom(add_one)), reducing(ReduceOp.custom(subtract))),
    Case("custom-sum", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.custom(add_one))),
    Case(
        "custom-order",
        "reduce",
        reducing(ReduceOp.custom(add_one)),
        reducing(ReduceOp.custom(add_one, commutative=False)),
    ),
    Case("order", "counts, shape", in_order(10, 20), in_order(20, 10)),
    Case(
        "order-of-kinds",
        "op",
        lambda pg, m: [pg.barrier(), pg.allreduce(m.array(10))],
        lambda pg, m: [pg.allreduce(m.array(10)), pg.barrier()],
    ),
    Case("key", "reduce", reducing(ReduceOp.SUM, "k"), reducing(ReduceOp.MAX, "k")),
    *(
        Case(f"key-{kind}", "counts, shape", counting(kind, 10, key="k"), counting(kind, 9, key="k"))
        for kind in (*SIZED, *PRIVATE)
    ),
    *(
        Case(f"key-empty-{kind}", "counts, shape", counting(kind, 10, key="k"), counting(kind, 0, key="k"))
        for kind in (*SIZED, *PRIVATE)
    ),
    Case("object-array", "op, dtype", lambda pg, m: pg.broadcast_object("a", 1), counting("broadcast", 10)),
]


class Told(NamedTuple):
    text: str
    ranks: tuple[int, ...]
    seconds: float


async def disagree(pg: ProcessGroup, case: Case, odd: int, delays: tuple[float, float]) -> Told:
    """Make this rank's calls of `case` after its delay; check all it sees and return what the error says."""
    is_odd = pg.rank() == odd
    memory = Memory(pg.rank(), is_odd)
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(delays[is_odd])
    last = clock() + max(delays) - delays[is_odd]
    works: list[Work[Any]] = []
    try:
        made = (case.odd if is_odd else case.most)(pg, memory)
        works = made if isinstance(made, list) else [made]
    except GroupRevokedError as error:  # the others have found it before this rank came
        assert isinstance(error.__cause__, CollectiveMismatchError)
    done = [work.done() for work in works]
    cause = await pg.wait_revoked()
    seconds = clock() - last
    assert isinstance(cause, CollectiveMismatchError)
    for work, early in zip(works, done, strict=True):
        assert work.done()
        if not early and (error := work.exception()) is not None:
            assert isinstance(error, CollectiveMismatchError)
            assert str(error) == str(cause)
    with pytest.raises(GroupRevokedError) as raised:
        pg.barrier()
    assert raised.value.__cause__ is cause
    assert pg.pending() == []
    # Whatever is still on its way finds nothing to write to.
    await asyncio.sleep(0)
    memory.check(alone=pg.size() == 2)
    return Told(str(cause), cause.ranks, seconds)


def check(case: Case, odd: int, world_size: int, told: list[Told]) -> None:
    """All ranks have heard the same, in time."""
    assert {each.text for each in told} == {told[0].text}
    text, ranks, _ = told[0]
    assert len(ranks) == 2
    assert odd in ranks
    one, two = sorted(ranks)
    assert re.match(rf"Collectives differ in the following: {case.fields}[a-z, ]*\. Group ", text), text
    call = r"[A-Z_]+\((shape=\[[\d, ]*\], dtype=\w+, device=\w+, |shape=\[\], device=cpu, )[^;]*SequenceNumber=\d+\)"
    assert re.search(rf": rank {one} called {call}; rank {two} called {call}$", text), text
    assert max(each.seconds for each in told) <= SOON
    assert world_size > max(ranks)


def run(case: Case, world_size: int, odd: int, delays: tuple[float, float], latency: Any, seed: int = 0) -> None:
    told = run_virtual(world_size, disagree, case, odd, delays, seed=seed, latency=latency)
    check(case, odd, world_size, told)


#: Seconds after which most ranks call, and the odd one does.
DELAYS = {"together": (0.0, 0.0), "odd-late": (0.0, 10.0), "odd-early": (10.0, 0.0)}
PLACES = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 2), (4, 3)]


@pytest.mark.parametrize("latency", [None, LATENCY], ids=["arena", "links"])
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_it_is_found_on_every_rank(case: Case, latency: Any) -> None:
    for world_size, odd in PLACES:
        for name, delays in DELAYS.items():
            try:
                run(case, world_size, odd, delays, latency)
            except BaseException as error:
                error.add_note(f"world_size={world_size} odd={odd} {name}")
                raise
