"""Test cases: collectives with fixed arguments on small arrays of random bits, for all ranks of a group."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll import ProcessGroup
from aiocoll.work import Work

from ..reductions import DTYPES, HALVES, LOGICAL, NARROW, OPS, allowed, numpy_dtype, reduce_op

__all__ = ["DTYPES", "Case", "bits", "cases", "counts", "moves", "reductions"]

Array = NDArray[Any]
#: A started call on one rank: its `Work`, and the arrays that will hold the results.
Made = tuple[Work[Any], list[Array]]


class Case(NamedTuple):
    """A collective with fixed arguments.

    Attributes:
        name: the collective, with its op and root.
        call: starts it on a rank.
        plain: whether the accelerator must carry it out once its ranks share memory.
    """

    name: str
    call: Callable[[ProcessGroup], Made]
    plain: bool


def bits(dtype: str, count: int, *seed: Any) -> Array:
    """Return an array of random bits; arrays of floats include infinities and NaNs with payloads."""
    kind = numpy_dtype(dtype)
    rng = np.random.default_rng(zlib.crc32(repr((dtype, count, *seed)).encode()))
    raw = rng.integers(0, 256, (count, kind.itemsize), np.uint8)
    if dtype in NARROW:
        return (raw[:, 0] % 16).astype(np.int8).astype(kind)
    if dtype == "bool":
        return raw[:, 0] % 2 == 0
    array = np.frombuffer(raw.tobytes(), kind).copy()
    if kind.itemsize >= 4 and kind.kind in "fc" and count:
        parts = array.view(f"f{kind.itemsize // 2 if kind.kind == 'c' else kind.itemsize}")
        special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0], parts.dtype)
        chosen = rng.integers(0, 4, parts.size) == 0
        parts[chosen] = rng.choice(special, int(chosen.sum()))
    return array


def counts(size: int, dtype: str) -> list[int]:
    """Return element counts: zero, counts near the number of ranks, and counts for each kind of slot."""
    each = numpy_dtype(dtype).itemsize
    inline, small, middle = 32 // each, 4096 // each, 16384 // each
    return sorted({0, 1, size - 1, size, size + 1, inline, inline + 1, small, small + 1, middle})


def cases(size: int, dtype: str, count: int) -> Iterator[Case]:
    """Yield a case for every collective, op and root, on arrays of `count` elements."""
    yield from moves(size, dtype, count)
    for op in OPS:
        if allowed(op, dtype):
            yield from reductions(size, dtype, count, op)


def moves(size: int, dtype: str, count: int) -> Iterator[Case]:
    """Yield a case for every root of each collective that moves data without a reduction."""

    def own_array(pg: ProcessGroup, *seed: Any, number: int = count) -> Array:
        return bits(dtype, number, "of rank", pg.rank(), *seed)

    def own_arrays(pg: ProcessGroup) -> list[Array]:
        return [own_array(pg, peer) for peer in range(size)]

    def zeros(number: int = count) -> Array:
        return np.zeros(number, numpy_dtype(dtype))

    def zeros_by_rank() -> list[Array]:
        return [zeros() for _ in range(size)]

    def broadcast(pg: ProcessGroup, root: int) -> Made:
        array = own_array(pg)
        return pg.broadcast(array, root), [array]

    def gather(pg: ProcessGroup, root: int) -> Made:
        outputs = zeros_by_rank() if pg.rank() == root else None
        return pg.gather(outputs, own_array(pg), root), outputs or []

    def scatter(pg: ProcessGroup, root: int) -> Made:
        output = zeros()
        return pg.scatter(output, own_arrays(pg) if pg.rank() == root else None, root), [output]

    def allgather(pg: ProcessGroup) -> Made:
        outputs = zeros_by_rank()
        return pg.allgather(outputs, own_array(pg)), outputs

    def allgather_into_tensor(pg: ProcessGroup) -> Made:
        output = zeros(size * count)
        return pg.allgather_into_tensor(output, own_array(pg)), [output]

    def alltoall(pg: ProcessGroup) -> Made:
        outputs = zeros_by_rank()
        return pg.alltoall(outputs, own_arrays(pg)), outputs

    def alltoall_base(pg: ProcessGroup) -> Made:
        output = zeros(size * count)
        return pg.alltoall_base(output, own_array(pg, number=size * count)), [output]

    def barrier(pg: ProcessGroup) -> Made:
        return pg.barrier(), []

    plain = count > 0
    for call in (allgather, allgather_into_tensor, alltoall, alltoall_base):
        yield Case(call.__name__, call, plain)
    for rooted in (broadcast, gather, scatter):
        for root in range(size):
            yield Case(f"{rooted.__name__} from {root}", lambda pg, call=rooted, root=root: call(pg, root), plain)
    yield Case("barrier", barrier, True)


def reductions(size: int, dtype: str, count: int, op: str) -> Iterator[Case]:
    """Yield a case for every root of each collective that reduces by `op`."""

    def own_array(pg: ProcessGroup, *seed: Any, number: int = count) -> Array:
        return bits(dtype, number, "of rank", pg.rank(), *seed)

    def allreduce(pg: ProcessGroup) -> Made:
        array = own_array(pg)
        return pg.allreduce(array, reduce_op(op, pg.rank())), [array]

    def keyed(pg: ProcessGroup) -> Made:
        array = own_array(pg)
        return pg.allreduce(array, reduce_op(op, pg.rank()), key=f"{op} {dtype} {count}"), [array]

    def scan(pg: ProcessGroup) -> Made:
        array = own_array(pg)
        return pg.scan(array, reduce_op(op, pg.rank())), [array]

    def exscan(pg: ProcessGroup) -> Made:
        array = own_array(pg)
        return pg.exscan(array, reduce_op(op, pg.rank())), [array]

    def reduce_scatter(pg: ProcessGroup) -> Made:
        output = np.zeros(count, numpy_dtype(dtype))
        inputs = [own_array(pg, peer) for peer in range(size)]
        return pg.reduce_scatter(output, inputs, reduce_op(op, pg.rank())), [output]

    def reduce_scatter_tensor(pg: ProcessGroup) -> Made:
        output = np.zeros(count, numpy_dtype(dtype))
        return pg.reduce_scatter_tensor(output, own_array(pg, number=size * count), reduce_op(op, pg.rank())), [output]

    def reduce(pg: ProcessGroup, root: int) -> Made:
        array = own_array(pg)
        return pg.reduce(array, root, reduce_op(op, pg.rank())), [array] if pg.rank() == root else []

    plain = count > 0 and op not in ("larger", "affine", "PREMUL_SUM") and dtype not in HALVES + NARROW
    portable = not (op == "PRODUCT" and dtype.startswith("complex"))  # complex products need the result of one rank
    calls = (allreduce, keyed, reduce_scatter, reduce_scatter_tensor)
    for call in calls if op == "AVG" else (*calls, scan, exscan):
        is_plain = plain and (call is not exscan or op not in LOGICAL) and (call not in (allreduce, keyed) or portable)
        yield Case(f"{call.__name__} {op}", call, is_plain)
    for root in range(size):
        yield Case(f"reduce {op} to {root}", lambda pg, root=root: reduce(pg, root), plain)
