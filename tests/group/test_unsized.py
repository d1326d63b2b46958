"""Allgather and gather without outputs: each rank may contribute a length that other ranks do not know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupOptions, PeerLostError, ProcessGroup, errors, testing
from aiocoll.engine.failure.stall_inspector import StallInspector

from ..internals import Limits, comm_of, wrap_methods, wrap_parts
from ..ranks import LINKS, parametrize_transports, wait_until

WORLDS = (1, 2, 3, 4, 7)
#: Functions (rank, p) that return the element count of a rank of p, by name.
LENGTHS: dict[str, Callable[[int, int], int]] = {
    "equal": lambda rank, p: 5,
    "none at all": lambda rank, p: 0,
    "none on even ranks": lambda rank, p: rank % 2,
    "none on odd ranks": lambda rank, p: 1 - rank % 2,
    "one more each": lambda rank, p: rank + 1,
    "p - 1 and p + 1": lambda rank, p: p + 1 - 2 * (rank % 2),
    "one large": lambda rank, p: 200_003 if rank == p // 2 else 3,
    "all large": lambda rank, p: 100_000 + 7 * rank,
}


def rank_values(rank: int, count: int, dtype: str = "float64") -> np.ndarray:
    return (np.arange(count) % 100 + 10 * rank).astype(dtype)


def check(outputs: Any, lengths: list[int], dtype: str = "float64") -> None:
    assert type(outputs) is list
    assert [each.size for each in outputs] == lengths
    for rank, each in enumerate(outputs):
        assert each.dtype == dtype
        assert each.flags.writeable
        assert np.array_equal(each, rank_values(rank, lengths[rank], dtype))


@pytest.mark.ranks(*WORLDS)
@parametrize_transports(*LINKS)
async def test_gathers_without_outputs_accept_inputs_of_any_length(pg: ProcessGroup) -> None:
    r, p = pg.rank(), pg.size()
    for length in LENGTHS.values():
        lengths = [length(each, p) for each in range(p)]
        mine = rank_values(r, lengths[r])
        check(await pg.allgather(None, mine), lengths)
        root = p // 2
        outputs = await pg.gather(None, mine, root)
        if r == root:
            check(outputs, lengths)
        else:
            assert outputs is None
        assert np.array_equal(mine, rank_values(r, lengths[r]))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128"])
async def test_gathers_without_outputs_support_every_dtype(pg: ProcessGroup, dtype: str) -> None:
    lengths = [3, 0, 5]
    mine = rank_values(pg.rank(), lengths[pg.rank()], dtype)
    check(await pg.allgather(None, mine), lengths, dtype)
    for root in range(3):
        outputs = await pg.gather(None, mine, root)
        if outputs is not None:
            check(outputs, lengths, dtype)


@pytest.mark.ranks(3)
async def test_gathers_without_outputs_support_narrow_dtypes(pg: ProcessGroup) -> None:
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    check(await pg.allgather(None, rank_values(pg.rank(), pg.rank(), dtype)), [0, 1, 2], dtype)
    outputs = await pg.gather(None, rank_values(pg.rank(), pg.rank(), dtype), 1)
    if pg.rank() == 1:
        check(outputs, [0, 1, 2], dtype)


@pytest.mark.ranks(3)
async def test_outputs_allocated_by_gathers_have_the_row_shape_of_the_ranks_own_tensor(pg: ProcessGroup) -> None:
    """Expect full rows of this rank's row shape, or a flat array if the length is not a multiple of a row."""
    shapes = [(2, 3), (4, 3), (5,)]
    mine = np.full(shapes[pg.rank()], pg.rank())
    found = [[(2, 3), (4, 3), (5,)], [(2, 3), (4, 3), (5,)], [(6,), (12,), (5,)]]
    outputs = await pg.allgather(None, mine)
    assert [each.shape for each in outputs] == found[pg.rank()]
    for root in range(3):
        gathered = await pg.gather(None, mine, root)
        if gathered is not None:
            assert [each.shape for each in gathered] == found[root]
    scalars = await pg.allgather(None, np.array(pg.rank(), np.float32))
    assert [(each.shape, each.item()) for each in scalars] == [((), 0), ((), 1), ((), 2)]


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_keyed_gathers_without_outputs_match_in_any_order(pg: ProcessGroup) -> None:
    r = pg.rank()
    keys = ["a", "b", "c"][:: 1 if r % 2 else -1]
    works = {key: pg.allgather(None, rank_values(r, 10 * r + ord(key)), key=key) for key in keys}
    rooted = {key: pg.gather(None, rank_values(r, r + ord(key)), 1, key=f"to {key}") for key in keys}
    ordered = [pg.allgather(None, rank_values(r, r + number)) for number in range(20)]
    for key in "abc":
        check(await works[key], [10 * each + ord(key) for each in range(3)])
        if r == 1:
            check(await rooted[key], [each + ord(key) for each in range(3)])
    for number, work in enumerate(ordered):
        check(await work, [each + number for each in range(3)])
    assert [work.seq for work in ordered] == list(range(1, 21))
    await pg.drain()


@pytest.mark.ranks(3)
async def test_late_gather_root_without_outputs_receives_all_blocks(pg: ProcessGroup) -> None:
    """Let the root call thousands of operations after the other ranks; include empty blocks."""
    if pg.rank():
        for number in range(3000):
            await pg.gather(None, rank_values(pg.rank(), number % 2 * pg.rank()), 0)
        await pg.send_object("gave all", 0)
    else:
        for peer in (1, 2):
            assert await pg.recv_object(peer) == "gave all"
        for number in range(3000):
            outputs = await pg.gather(None, rank_values(0, 1), 0)
            check(outputs, [1, number % 2, number % 2 * 2])


@pytest.mark.ranks(*WORLDS)
async def test_gather_with_outputs_accepts_zero_lengths(pg: ProcessGroup) -> None:
    r, p = pg.rank(), pg.size()
    for root in range(p):
        outputs = [np.empty(each % 2) for each in range(p)] if r == root else None
        assert await pg.gather(outputs, rank_values(r, r % 2), root) == outputs
        if outputs is not None:
            check(outputs, [each % 2 for each in range(p)])


@pytest.mark.ranks(2, 3, 4, options=GroupOptions(debug="detail"))
async def test_gathers_without_outputs_work_with_compared_calls(pg: ProcessGroup) -> None:
    r, p = pg.rank(), pg.size()
    for length in LENGTHS.values():
        lengths = [length(each, p) for each in range(p)]
        check(await pg.allgather(None, rank_values(r, lengths[r])), lengths)
        check(await pg.allgather(None, rank_values(r, lengths[r]), key="k"), lengths)
        outputs = await pg.gather(None, rank_values(r, lengths[r]), p - 1)
        if outputs is not None:
            check(outputs, lengths)


@pytest.mark.parametrize("debug", ["off", "detail"])
@pytest.mark.parametrize("world_size", WORLDS)
async def test_gathers_without_outputs_work_in_coalescing_blocks(world_size: int, debug: Any) -> None:
    """Use equal lengths for `gather`: in a block, all tensors must be as long as the root's."""

    async def rank(pg: ProcessGroup) -> None:
        r, p = pg.rank(), pg.size()
        for length in LENGTHS.values():
            lengths = [length(each, p) for each in range(p)]
            async with pg.coalescing():
                total = pg.allreduce(np.full(3, r))
                uneven = [pg.allgather(None, rank_values(r, lengths[r])) for _ in range(2)]
                keyed = pg.allgather(None, rank_values(r, lengths[r]), key="k")
                rooted = [pg.gather(None, rank_values(r, 4), 0), pg.gather(None, rank_values(r, 2), 0)]
            assert (total.result() == p * (p - 1) // 2).all()
            for work in (*uneven, keyed):
                check(work.result(), lengths)
            if r == 0:
                check(rooted[0].result(), [4] * p)
                check(rooted[1].result(), [2] * p)

    await testing.run_ranks(world_size, rank, options=GroupOptions(debug=debug))


@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_slow_step_of_an_allgather_without_outputs_is_not_reported_as_a_mismatch(
    debug: Any, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """Delay one step; the stall reports of the waiting rank and the queried rank must show the same call."""
    limits(report_after=0.01)
    steps: dict[int, Callable[[], None]] = {}

    def hold_step(original: Callable[[Any], None], operation: Any) -> None:
        steps[operation.comm.rank] = partial(original, operation)

    def report_on_rank_1(original: Callable[[Any, Any], float], stalls: Any, operation: Any) -> float:
        """Suppress the stall reports of all ranks but rank 1, which then queries the other ranks first."""
        return original(stalls, operation) if operation.comm.rank == 1 else inf

    wrap_parts(monkeypatch, complete_stepped_operation=hold_step)
    wrap_methods(monkeypatch, StallInspector, report=report_on_rank_1)

    async def rank(pg: ProcessGroup) -> None:
        comm = comm_of(pg)
        work = pg.allgather(None, rank_values(pg.rank(), 3))
        if pg.rank() == 1:
            await wait_until(lambda: len(steps) == 3)
            steps[0]()
            steps[1]()
            step = list(comm.in_flight._operations)[-1]
            await wait_until(lambda: work.done() or comm.stalls.finding(step) is not None)
            steps[2]()
        check(await work, [3] * 3)

    await testing.run_ranks(3, rank, options=GroupOptions(debug=debug))


@pytest.mark.ranks(2)
async def test_gather_in_a_block_without_outputs_requires_tensors_of_equal_length(pg: ProcessGroup) -> None:
    with suppress(errors.GroupError):  # on a rank that only sends, the call may have completed
        async with pg.coalescing():
            pg.gather(None, rank_values(pg.rank(), 3 + pg.rank()), 0)
            pg.gather(None, rank_values(pg.rank(), 3), 0)
    cause = await pg.wait_revoked()
    assert isinstance(cause, CollectiveMismatchError)
    assert "GATHER" in str(cause)


@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_allgather_with_outputs_on_only_some_ranks_is_reported_as_a_mismatch(debug: Any) -> None:
    async def rank(pg: ProcessGroup) -> str:
        outputs = None if pg.rank() else [np.empty(3) for _ in range(3)]
        with pytest.raises(CollectiveMismatchError, match=r"Collectives differ in the following: op") as raised:
            await pg.allgather(outputs, rank_values(pg.rank(), 3))
        return str(raised.value)

    for message in await testing.run_ranks(3, rank, options=GroupOptions(debug=debug)):
        assert "rank 0 called ALLGATHER(shape=[3], dtype=float64, device=cpu, counts=[3, 3, 3]" in message
        assert "called ALLGATHER_ALLOCATED(shape=[3], dtype=float64, device=cpu, " in message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["allgather", "gather"])
async def test_gathers_without_outputs_of_different_dtypes_are_reported_as_a_mismatch(
    pg: ProcessGroup, kind: str
) -> None:
    mine = rank_values(pg.rank(), 3, "float32" if pg.rank() else "float64")
    with suppress(errors.GroupError):  # on a rank that only sends, the call may have completed
        await (pg.allgather(None, mine) if kind == "allgather" else pg.gather(None, mine, 0))
    assert "Collectives differ in the following: dtype" in str(await pg.wait_revoked())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["allgather", "gather"])
async def test_error_of_a_gather_without_outputs_names_a_rank_that_has_left_the_group(
    pg: ProcessGroup, kind: str
) -> None:
    if pg.rank() == 1:
        return
    mine = rank_values(pg.rank(), 3)
    with pytest.raises(PeerLostError) as raised:
        await (pg.allgather(None, mine) if kind == "allgather" else pg.gather(None, mine, 0))
    assert raised.value.ranks == (1,)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["allgather", "gather"])
async def test_timeout_error_of_a_gather_without_outputs_names_the_missing_rank(pg: ProcessGroup, kind: str) -> None:
    if pg.rank() == 1:
        await pg.wait_revoked()
        return
    mine = rank_values(pg.rank(), 3)
    with pytest.raises(errors.CollectiveTimeoutError, match="waits for rank 1") as raised:
        await (pg.allgather(None, mine, timeout=0.5) if kind == "allgather" else pg.gather(None, mine, 0, timeout=0.5))
    assert raised.value.ranks == (1,)


@pytest.mark.ranks(3)
async def test_gathers_with_outputs_run_in_one_step(pg: ProcessGroup) -> None:
    """Check that each call with outputs is a single operation."""
    before = len(comm_of(pg).journal.collectives)
    await pg.allgather([np.empty(3) for _ in range(3)], rank_values(pg.rank(), 3))
    await pg.gather([np.empty(3) for _ in range(3)] if pg.rank() == 0 else None, rank_values(pg.rank(), 3), 0)
    assert len(comm_of(pg).journal.collectives) == before + 2


@pytest.mark.ranks(3)
@parametrize_transports("unix")
async def test_aborted_gather_without_outputs_leaves_no_operations(pg: ProcessGroup) -> None:
    """Abort the group while the blocks are transferred."""
    mine = rank_values(pg.rank(), 300_000 + pg.rank())
    works = [pg.allgather(None, mine), pg.gather(None, mine, 0)]
    if pg.rank() == 1:
        pg.abort("on purpose")
    assert "on purpose" in str(await pg.wait_revoked())
    for work in works:
        assert work.is_success() or "on purpose" in str(work.exception())
