"""Results of collectives for all dtypes, ops, roots, sizes and counts: a pairwise cover, or every combination."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup

from ..pairwise import Case, cover
from ..ranks import TRANSPORTS, run_ranks
from ..reductions import DTYPES, OPS, allowed, data, equal, numpy_dtype, reduce_op, reduced

REDUCING = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
MOVING = ("broadcast", "allgather", "gather", "scatter", "alltoall")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
SIZES = (1, 2, 3, 4, 7)
#: Element counts by name; p is the world size.
COUNTS = {
    "0": lambda _: 0,
    "1": lambda _: 1,
    "p-1": lambda p: p - 1,
    "p": lambda p: p,
    "p+1": lambda p: p + 1,
    "1000": lambda _: 1000,
    "1000000": lambda _: 1_000_000,
}
SPACE = {
    "dtype": DTYPES,
    "count": tuple(COUNTS),
    "root": range(max(SIZES)),
    "world_size": SIZES,
    "transport": TRANSPORTS,
}
#: The number of elements before and after each array, which calls must not change.
MARGIN = 8


def valid(case: Case) -> bool:
    """Return whether a test case can be a valid call; a case may lack some arguments."""
    root, kind, op = case.get("root", 0), case.get("kind"), case.get("op")
    if root >= case.get("world_size", max(SIZES)) or (root and kind is not None and kind not in ROOTED):
        return False
    if op == "AVG" and kind in ("scan", "exscan"):
        return False
    return op is None or "dtype" not in case or allowed(op, case["dtype"])


def label(case: Case) -> str:
    names = ("kind", "dtype", "op", "world_size", "count", "root", "transport")
    return "-".join(str(case[name]) for name in names if name in case)


def pairs() -> Iterator[Case]:
    yield from cover({"kind": REDUCING, "op": OPS, **SPACE}, valid)
    yield from cover({"kind": MOVING, **SPACE}, valid)


# Cached because all ranks share this process, and each rank needs the data of all ranks.
_data = lru_cache(maxsize=64)(data)


@lru_cache(maxsize=16)
def _total(op: str, dtype: str, ranks: int, start: int, count: int, world_size: int) -> Any:
    """Return the reduction of the first `ranks` ranks' data."""
    return reduced(op, dtype, [_data(dtype, op, rank, start, count) for rank in range(ranks)], world_size)


class Call:
    """A collective call of one rank in a test case, with its arrays and expected results."""

    def __init__(self, case: Case, rank: int) -> None:
        self.kind = case["kind"]
        self.dtype = case["dtype"]
        self.op = case.get("op", "SUM")
        self.root = case["root"]
        self.size = case["world_size"]
        self.rank = rank
        self.count = COUNTS[case["count"]](self.size)
        # Cut the array into one part per rank. Parts differ by at most one element and may be empty.
        self.cuts = [part * self.count // self.size for part in range(self.size + 1)]

    def whole(self, rank: int) -> Any:
        return _data(self.dtype, self.op, rank, 0, self.count)

    def part(self, rank: int, part: int) -> Any:
        """Return the data of `rank` for the given part of the array."""
        start, stop = self.cuts[part : part + 2]
        return _data(self.dtype, self.op, rank, start, stop - start)

    def total(self, ranks: int, start: int, stop: int) -> Any:
        return _total(self.op, self.dtype, ranks, start, stop - start, self.size)

    def mine(self, values: Any) -> Any:
        """Return `values` in the middle of a larger array, whose margins reveal writes beyond the bounds."""
        around = np.full(len(values) + 2 * MARGIN, 1, numpy_dtype(self.dtype))
        around[MARGIN : len(around) - MARGIN] = values
        self.margins.append(around)
        return around[MARGIN : len(around) - MARGIN]

    def room(self, count: int) -> Any:
        return self.mine(np.zeros(count, numpy_dtype(self.dtype)))

    async def run(self, pg: ProcessGroup) -> list[Any]:
        """Make the call; return this rank's arrays, inputs first."""
        self.margins: list[Any] = []
        is_root = self.rank == self.root
        world = range(self.size)
        length = [stop - start for start, stop in zip(self.cuts, self.cuts[1:], strict=False)]
        op = reduce_op(self.op, self.rank)
        if self.kind in ("allreduce", "scan", "exscan"):
            arrays = [self.mine(self.whole(self.rank))]
            result = await getattr(pg, self.kind)(arrays[0], op)
        elif self.kind == "reduce":
            arrays = [self.mine(self.whole(self.rank))]
            result = await pg.reduce(arrays[0], self.root, op)
        elif self.kind == "broadcast":
            arrays = [self.mine(self.whole(self.rank))]
            result = await pg.broadcast(arrays[0], self.root)
        elif self.kind == "reduce_scatter":
            arrays = [self.mine(self.part(self.rank, part)) for part in world] + [self.room(length[self.rank])]
            result = await pg.reduce_scatter(arrays[-1], arrays[:-1], op)
        elif self.kind == "allgather":
            arrays = [self.mine(self.part(self.rank, self.rank)), *(self.room(n) for n in length)]
            result = await pg.allgather(arrays[1:], arrays[0])
        elif self.kind == "gather":
            arrays = [self.mine(self.part(self.rank, self.rank)), *(self.room(n) for n in length if is_root)]
            result = await pg.gather(arrays[1:], arrays[0], self.root)
        elif self.kind == "scatter":
            arrays = [self.mine(self.part(self.rank, part)) for part in world if is_root] + [
                self.room(length[self.rank])
            ]
            result = await pg.scatter(arrays[-1], arrays[:-1], self.root)
        else:
            arrays = [self.mine(self.part(self.rank, (self.rank + peer) % self.size)) for peer in world]
            arrays += [self.room(length[(self.rank + peer) % self.size]) for peer in world]
            result = await pg.alltoall(arrays[self.size :], arrays[: self.size])
        for around in self.margins:
            margins = np.concatenate([around[:MARGIN], around[len(around) - MARGIN :]])
            assert np.all(margins == 1), "elements next to the array were overwritten"
        self.check_result(result, arrays, is_root)
        return arrays

    def check_result(self, result: Any, arrays: list[Any], is_root: bool) -> None:
        """Check that the call returned the output arrays that this rank passed."""
        if self.kind in ("allgather", "gather", "alltoall"):
            outputs = arrays[self.size :] if self.kind == "alltoall" else arrays[1:]
            if self.kind == "gather" and not is_root:
                assert result is None
            else:
                assert [id(each) for each in result] == [id(each) for each in outputs]
        else:
            assert result is arrays[-1]

    def expected(self) -> list[Any]:
        """Return the expected arrays after the call, in the order in which `run` returns them."""
        world = range(self.size)
        is_root = self.rank == self.root
        if self.kind == "allreduce":
            return [self.total(self.size, 0, self.count)]
        if self.kind in ("scan", "exscan"):
            below = self.rank + (self.kind == "scan")
            return [self.total(below, 0, self.count) if below else self.whole(0)]
        if self.kind == "reduce":
            return [self.total(self.size, 0, self.count) if is_root else self.whole(self.rank)]
        if self.kind == "broadcast":
            return [self.whole(self.root)]
        if self.kind == "reduce_scatter":
            total = self.total(self.size, *self.cuts[self.rank : self.rank + 2])
            return [*(self.part(self.rank, part) for part in world), total]
        if self.kind in ("allgather", "gather"):
            gathered = [self.part(rank, rank) for rank in world if is_root or self.kind == "allgather"]
            return [self.part(self.rank, self.rank), *gathered]
        if self.kind == "scatter":
            return [*(self.part(self.rank, part) for part in world if is_root), self.part(self.root, self.rank)]
        parts = [(self.rank + peer) % self.size for peer in world]
        sent = [self.part(self.rank, part) for part in parts]
        return sent + [self.part(peer, part) for peer, part in zip(world, parts, strict=True)]


async def check(pg: ProcessGroup, cases: list[Case]) -> list[bytes]:
    """Run cases one after the other and check their results; return the result bytes of allreduce cases."""
    seen = []
    for case in cases:
        call = Call(case, pg.rank())
        arrays, expected = await call.run(pg), call.expected()
        assert len(arrays) == len(expected)
        for array, right in zip(arrays, expected, strict=True):
            assert equal(array, right), f"{label(case)} on rank {pg.rank()}: {array} instead of {right}"
        if case["kind"] == "allreduce":
            seen.append(arrays[0].tobytes())
    return seen


async def run(world_size: int, transport: str, cases: list[Case]) -> None:
    first, *others = await run_ranks(world_size, check, cases, transport=transport, timeout=240.0)
    assert all(each == first for each in others), "ranks have sums with different bits"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", SIZES)
async def test_collectives_give_closed_form_results_for_a_pairwise_cover_of_arguments(
    world_size: int, transport: str
) -> None:
    await run(
        world_size,
        transport,
        [case for case in pairs() if (case["world_size"], case["transport"]) == (world_size, transport)],
    )


def test_pairwise_cover_contains_every_pair_of_argument_values() -> None:
    cases = list(pairs())
    for kind, op in product(REDUCING, OPS):
        met = any(case["kind"] == kind and case.get("op") == op for case in cases)
        assert met == valid({"kind": kind, "op": op})
    for op, dtype in product(OPS, DTYPES):
        assert any(case.get("op") == op and case["dtype"] == dtype for case in cases) == allowed(op, dtype)
    for root, size in product(SPACE["root"], SIZES):
        assert any(case["root"] == root and case["world_size"] == size for case in cases) == (root < size)


def everything(dtype: str, world_size: int) -> Iterator[Case]:
    """Yield every valid case of a dtype and a world size."""
    for kind in REDUCING + MOVING:
        ops = [op for op in OPS if valid({"kind": kind, "op": op, "dtype": dtype})] if kind in REDUCING else [None]
        roots = range(world_size) if kind in ROOTED else range(1)
        for op, count, root in product(ops, COUNTS, roots):
            yield {"kind": kind, "dtype": dtype, "count": count, "root": root, "world_size": world_size} | (
                {} if op is None else {"op": op}
            )


@pytest.mark.matrix
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_collectives_give_closed_form_results_for_all_combinations_of_arguments(
    dtype: str, world_size: int, transport: str
) -> None:
    await run(world_size, transport, list(everything(dtype, world_size)))
