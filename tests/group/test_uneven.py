"""Arrays of different lengths per rank in every call that supports them, and mismatched lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.errors import CollectiveMismatchError
from aiocoll.testing.virtual import run_virtual

from ..ranks import LINKS, parametrize_transports

SIZES = (1, 2, 3, 4, 7)
#: Functions (r, p) that return the element count of rank r of p, by name. The eager window has 32,768 elements.
LENGTHS: dict[str, Callable[[int, int], int]] = {
    "rising": lambda r, p: r,
    "falling to one": lambda r, p: p - r,
    "only the first": lambda r, p: 5 * (r == 0),
    "only the last": lambda r, p: 5 * (r == p - 1),
    "all but the first": lambda r, p: 3 * (r > 0),
    "one large": lambda r, p: 70_001 if r == p // 2 else 2,
    "around the window": lambda r, p: 32_767 + r % 3,
}


def data(by: int, to: int, count: int) -> Any:
    """Return the data that rank `by` sends to rank `to`, with `count` elements."""
    return np.arange(count, dtype=np.int64) * 100 + by * 10 + to


def blank(count: int) -> Any:
    return np.full(count, -1, np.int64)


def are_equal(got: list[Any], right: list[Any]) -> bool:
    return len(got) == len(right) and all(np.array_equal(a, b) for a, b in zip(got, right, strict=True))


async def check_every_call(pg: ProcessGroup, names: list[str]) -> None:
    for name in names:
        await check_moves(pg, name)
        await check_reductions(pg, name)
        await check_exchanges(pg, name)


async def check_moves(pg: ProcessGroup, name: str) -> None:
    rank, size = pg.rank(), pg.size()
    counts = [LENGTHS[name](each, size) for each in range(size)]
    by_rank = [data(by, 0, count) for by, count in enumerate(counts)]
    got = await pg.allgather([blank(count) for count in counts], by_rank[rank])
    assert are_equal(got, by_rank), f"{name}: {got}"
    # Call in place: the input is this rank's block of the outputs. Pass a key.
    outputs = [blank(count) for count in counts]
    outputs[rank][:] = by_rank[rank]
    assert are_equal(await pg.allgather(outputs, outputs[rank], key="again"), by_rank)
    for root in {0, size // 2, size - 1}:
        is_root = rank == root
        gathered = await pg.gather([blank(count) for count in counts] if is_root else [], by_rank[rank], root)
        assert are_equal(gathered, by_rank) if is_root else gathered is None
        output = await pg.scatter(blank(counts[rank]), by_rank if is_root else None, root)
        assert np.array_equal(output, by_rank[rank])


async def check_reductions(pg: ProcessGroup, name: str) -> None:
    rank, size = pg.rank(), pg.size()
    counts = [LENGTHS[name](each, size) for each in range(size)]
    blocks = [data(rank, to, count) for to, count in enumerate(counts)]
    columns = [data(by, rank, counts[rank]) for by in range(size)]
    assert np.array_equal(await pg.reduce_scatter(blank(counts[rank]), blocks), np.sum(columns, axis=0))
    # Call in place, with a noncommutative op, whose result depends on the rank order.
    ordered = ReduceOp.custom(_take_second, commutative=False)
    assert np.array_equal(await pg.reduce_scatter(blocks[rank], blocks, ordered), columns[-1])


def _take_second(a: Any, b: Any, out: Any) -> None:
    out[:] = b


async def check_exchanges(pg: ProcessGroup, name: str) -> None:
    rank, size = pg.rank(), pg.size()

    def count(by: int, to: int) -> int:
        return LENGTHS[name]((by + 2 * to) % size, size)

    sent = [data(rank, to, count(rank, to)) for to in range(size)]
    come = [data(by, rank, count(by, rank)) for by in range(size)]
    assert are_equal(await pg.alltoall([blank(len(each)) for each in come], sent), come)
    # Exchange rows of three elements each.
    ins, outs = [np.repeat(each[:, None], 3, 1) for each in come], [np.repeat(each[:, None], 3, 1) for each in sent]
    into = np.full((sum(map(len, come)), 3), -1, np.int64)
    await pg.alltoall_base(into, np.concatenate(outs), [len(each) for each in come], [len(each) for each in sent])
    assert np.array_equal(into, np.concatenate(ins))


@pytest.mark.ranks(*SIZES)
async def test_arrays_of_uneven_lengths_work_in_every_call(pg: ProcessGroup) -> None:
    await check_every_call(pg, list(LENGTHS))


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS[1:])
async def test_arrays_of_uneven_lengths_work_over_every_transport(pg: ProcessGroup) -> None:
    await check_every_call(pg, list(LENGTHS))


@pytest.mark.matrix
@pytest.mark.ranks(*SIZES)
@parametrize_transports(*LINKS)
async def test_arrays_of_uneven_lengths_work_in_every_call_at_every_world_size(pg: ProcessGroup) -> None:
    await check_every_call(pg, list(LENGTHS))


@pytest.mark.parametrize("seed", range(3))
def test_arrays_of_uneven_lengths_work_with_delayed_frames(seed: int) -> None:
    run_virtual(4, check_every_call, list(LENGTHS), seed=seed, latency=(0.0001, 0.01))


@pytest.mark.ranks(2)
async def test_arrays_of_uneven_lengths_can_have_any_shape(pg: ProcessGroup) -> None:
    tensor = np.full((2, 3) if pg.rank() else (1, 1, 4), pg.rank(), np.int16)
    outputs = [np.empty((4, 1), np.int16), np.empty(6, np.int16)]
    await pg.allgather(outputs, tensor)
    assert outputs[0].tolist() == [[0]] * 4
    assert outputs[1].tolist() == [1] * 6


def _blank_parts(count: int) -> list[Any]:
    return [blank(2), blank(count), blank(2)]


#: Mismatched calls: the array to or from rank 1 has n elements, but other ranks expect 2.
WRONG: dict[str, Callable[[ProcessGroup, int], Any]] = {
    "allgather": lambda pg, n: pg.allgather(_blank_parts(n), blank(n if pg.rank() == 1 else 2)),
    "gather": lambda pg, n: pg.gather(_blank_parts(2) if pg.rank() == 0 else None, blank(n), 0),
    "scatter": lambda pg, n: pg.scatter(blank(n), _blank_parts(2) if pg.rank() == 0 else None, 0),
    "reduce_scatter": lambda pg, n: pg.reduce_scatter(blank(n if pg.rank() == 1 else 2), _blank_parts(n)),
    "alltoall": lambda pg, n: pg.alltoall(
        _blank_parts(2), [blank(n if to == (pg.rank() + 1) % 3 else 2) for to in range(3)]
    ),
    "alltoall_base": lambda pg, n: pg.alltoall_base(
        blank(6), blank(4 + n), None, [n if to == (pg.rank() + 1) % 3 else 2 for to in range(3)]
    ),
}


@pytest.mark.parametrize("count", [3, 1, 0])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.ranks(3)
@parametrize_transports("memory", "shm")
async def test_array_lengths_on_which_ranks_disagree_are_reported_as_a_mismatch(
    pg: ProcessGroup, kind: str, count: int
) -> None:
    # This rank may complete the call before a rank detects the mismatch.
    with contextlib.suppress(CollectiveMismatchError):
        await WRONG[kind](pg, count if pg.rank() == 1 else 2)
    cause = await pg.wait_revoked()
    assert isinstance(cause, CollectiveMismatchError)
    message = str(cause)
    assert "Collectives differ in the following: counts" in message
    assert kind.removesuffix("_base").upper() in message
    assert "rank 1 called" in message
