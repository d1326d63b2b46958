"""Call comparison with `debug="detail"`: mismatches are found before any data moves."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupOptions,
    GroupRevokedError,
    PeerLostError,
    ProcessGroup,
    Recv,
    ReduceOp,
    Send,
    Work,
    testing,
)
from aiocoll.engine.operations.comparison import compare, packed
from aiocoll.engine.operations.signature import Signature, description
from aiocoll.group.parts import parts_of
from aiocoll.testing.virtual import run_virtual
from aiocoll.work import completion_of

from ..engine.test_mismatch import DELAYS, KINDS, LATENCY, P2P_TABLE, PLACES, SIZED, TABLE, Call, Case, Memory, counting
from ..ranks import LINKS, options

DETAIL = GroupOptions(debug="detail")
#: The maximum number of cases that run concurrently over sockets.
CHUNK = 12


def now() -> float:
    return asyncio.get_running_loop().time()


async def run_detailed(world_size: int, fn: Callable[..., Any], *args: Any, transport: str = "memory") -> list[Any]:
    given = GroupOptions(transport=options(transport).transport, debug="detail")
    return await testing.run_ranks(world_size, fn, *args, options=given, timeout=60)


async def mismatch_of(work: Work[Any]) -> CollectiveMismatchError:
    """Await a work that must fail with a mismatch error; return the error."""
    with pytest.raises(CollectiveMismatchError) as caught:
        await work
    return caught.value


async def check_still_works(pg: ProcessGroup) -> None:
    """Check that the group can still make calls."""
    assert pg.pending() == []
    assert await pg.allreduce(pg.rank() + 1) == pg.size() * (pg.size() + 1) // 2
    assert await pg.allgather_object(pg.rank(), key="still") == list(range(pg.size()))


# -- mismatches


async def mismatch_texts(pg: ProcessGroup, case: Case, odd: int, delays: tuple[float, float]) -> list[str]:
    """Make this rank's mismatched calls after a delay; return the error texts."""
    is_odd = pg.rank() == odd
    memory = Memory(pg.rank(), is_odd)
    await asyncio.sleep(delays[is_odd])
    made = (case.odd if is_odd else case.most)(pg, memory)
    works = made if isinstance(made, list) else [made]
    errors = [await mismatch_of(work) for work in works]
    for work, error in zip(works, errors, strict=True):
        assert (error.op, error.seq, error.group) == (work.op, work.key or work.seq, pg.group_name)
        assert odd in error.ranks
    memory.check(alone=True)
    await check_still_works(pg)
    return [str(error) for error in errors]


def check(case: Case, texts: list[list[str]]) -> None:
    """Check that all ranks have the same error texts, which name the differing fields of the calls."""
    assert all(each == texts[0] for each in texts)
    for text in texts[0]:
        assert text.startswith(f"Collectives differ in the following: {case.fields.split(',')[0]}"), text
        assert all(field in text.split(". Group")[0] for field in case.fields.split(", ")), text
        assert text.count("SequenceNumber=") == text.count(" called ") >= 2, text


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TABLE)), ids=lambda number: TABLE[number].name)
def test_compared_mismatch_is_raised_on_every_rank_and_the_group_continues(number: int) -> None:
    """Check one deviating rank and one order of calls per case; a later test checks all combinations."""
    case = TABLE[number]
    orders = list(DELAYS.values())
    for turn in range(2):
        world_size, odd = [*PLACES, (7, 5)][(number + 4 * turn) % 9]
        latency = (None, LATENCY)[(number + turn) % 2]
        found = run_virtual(
            world_size,
            mismatch_texts,
            case,
            odd,
            orders[(number + turn) % 3],
            latency=latency,
            options=DETAIL,
            seed=number,
        )
        check(case, found)


@pytest.mark.matrix
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_compared_mismatch_is_raised_on_every_rank_for_all_deviating_ranks_and_call_orders(case: Case) -> None:
    for world_size, odd in (*PLACES, (7, 0), (7, 5)):
        for order in DELAYS.values():
            for latency in (None, LATENCY):
                check(case, run_virtual(world_size, mismatch_texts, case, odd, order, latency=latency, options=DETAIL))


@pytest.mark.parametrize("start", range(0, len(TABLE), CHUNK), ids=lambda start: TABLE[start].name)
async def test_compared_mismatch_is_raised_on_every_rank_over_sockets(start: int) -> None:
    async def check_case(index: int) -> None:
        world_size, odd = PLACES[index % len(PLACES)]
        transport = ("unix", "tcp", "shm")[index % 3]
        texts = await run_detailed(world_size, mismatch_texts, TABLE[index], odd, (0.0, 0.0), transport=transport)
        check(TABLE[index], texts)

    await asyncio.gather(*map(check_case, range(start, min(start + CHUNK, len(TABLE)))))


@pytest.mark.parametrize("kind", ["allreduce", "reduce", "broadcast", "scan", "exscan"])
def test_different_shapes_with_the_same_element_count_are_reported_as_a_mismatch(kind: str) -> None:
    """Check calls that would match without the comparison of shapes."""
    calls: dict[str, Callable[[ProcessGroup, Any], Work[Any]]] = {
        "allreduce": lambda pg, x: pg.allreduce(x),
        "reduce": lambda pg, x: pg.reduce(x, 1),
        "broadcast": lambda pg, x: pg.broadcast(x, 1),
        "scan": lambda pg, x: pg.scan(x),
        "exscan": lambda pg, x: pg.exscan(x),
    }

    async def rank(pg: ProcessGroup) -> None:
        tensor = np.full((2, 3) if pg.rank() else (6,), 1.0)
        error = await mismatch_of(calls[kind](pg, tensor))
        assert str(error).startswith("Collectives differ in the following: shape. Group")
        assert f"rank 0 called {kind.upper()}(shape=[6]" in str(error)
        assert f"ranks 1, 2 called {kind.upper()}(shape=[2, 3]" in str(error)
        assert error.ranks == (0, 1)
        assert (tensor == 1).all()
        await check_still_works(pg)

    run_virtual(3, rank, options=DETAIL)


async def check_uneven_parts(pg: ProcessGroup) -> None:
    """Make calls on parts of different shapes, which are not a mismatch."""
    size, rank = pg.size(), pg.rank()
    sizes = [(2, 3) if each else (6,) for each in range(size)]
    mine = np.full(sizes[rank], float(rank))
    outputs = [np.zeros(each) for each in sizes]
    await pg.allgather(outputs, mine)
    assert [each.flat[0] for each in outputs] == list(range(size))
    inputs = [np.full(each + 1, float(rank)) for each in range(size)]
    part = np.zeros(rank + 1)
    await pg.reduce_scatter(part, inputs)
    assert part.tolist() == [sum(range(size))] * (rank + 1)
    await pg.scatter(part, inputs if rank == size - 1 else None, size - 1)
    assert part.tolist() == [size - 1] * (rank + 1)
    got = [np.zeros(rank + 1) for _ in range(size)]
    await pg.alltoall(got, inputs)
    assert [each.tolist() for each in got] == [[other] * (rank + 1) for other in range(size)]


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
async def test_equal_calls_are_carried_out_after_the_comparison(world_size: int, transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        for count in (0, 1, pg.size() - 1, pg.size() + 1, 100_000):
            array = np.full(count, pg.rank() + 1.0)
            assert await pg.allreduce(array) is array
            assert (array == pg.size() * (pg.size() + 1) // 2).all()
            await pg.broadcast(array, pg.size() - 1, key="b")
        assert await pg.allreduce(pg.rank() + 1) == pg.size() * (pg.size() + 1) // 2
        await check_uneven_parts(pg)
        await pg.barrier()
        await pg.monitored_barrier()
        assert await pg.alltoall_object(list(range(pg.size()))) == [pg.rank()] * pg.size()
        # An unsupported object raises an error on this rank only, before any comparison.
        with pytest.raises(TypeError):
            pg.allreduce("no array")
        await check_still_works(pg)

    await run_detailed(world_size, rank, transport=transport)


async def test_mismatch_error_shows_a_limited_number_of_calls() -> None:
    async def rank(pg: ProcessGroup) -> CollectiveMismatchError:
        return await mismatch_of(pg.allreduce(np.zeros(pg.rank() + 1)))

    for error in await run_detailed(10, rank):
        assert error.ranks == tuple(range(10))
        assert str(error).endswith("; and 2 more distinct calls of other ranks")


def test_mismatch_error_counts_equal_calls_of_many_ranks() -> None:
    calls = [
        packed(description(rank, Signature("BARRIER", None, (), None, None), (), None, 1), None) for rank in range(1)
    ]
    other = packed(description(1, Signature("ALLREDUCE", "int64", (1,), None, "SUM"), (1,), None, 1), None)
    found = compare("world", calls * 20 + [other])
    assert found is not None
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more called BARRIER(" in found.text
    assert "; rank 20 called ALLREDUCE(" in found.text
    assert found.ranks == [0, 20]
    assert compare("world", calls * 20) is None


# -- lists with a wrong number of arrays

MISCOUNTED: dict[str, Callable[[ProcessGroup, int], Work[Any]]] = {
    "scatter": lambda pg, n: pg.scatter(np.zeros(3), [np.ones(3)] * n if pg.rank() == 0 else None, 0),
    "gather": lambda pg, n: pg.gather([np.ones(3)] * n if pg.rank() == 0 else None, np.zeros(3), 0),
    "allgather": lambda pg, n: pg.allgather([np.ones(3) for _ in range(n)], np.zeros(3)),
    "reduce_scatter": lambda pg, n: pg.reduce_scatter(np.zeros(3), [np.ones(3)] * n),
    "alltoall": lambda pg, n: pg.alltoall([np.ones(3) for _ in range(n)], [np.ones(3)] * n),
    "scatter_object": lambda pg, n: pg.scatter_object([1] * n, 0),
    "alltoall_object": lambda pg, n: pg.alltoall_object([1] * n),
}


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("kind", MISCOUNTED)
def test_wrong_number_of_arrays_raises_an_error_on_all_ranks(kind: str, more: int) -> None:
    async def rank(pg: ProcessGroup) -> str:
        error = await mismatch_of(MISCOUNTED[kind](pg, pg.size() + (more if pg.rank() == 0 else 0)))
        text = str(error)
        assert text.startswith("Collectives differ in the following: number of ranks. Group"), text
        assert f"rank 0 called {kind.upper()}(shape=[" in text
        assert f"one {'object' if 'object' in kind else 'array'} per rank: 3, not {3 + more}; " in text
        assert f"; ranks 1, 2 called {kind.upper()}(" in text
        assert text.count("SequenceNumber=1") == 2
        assert isinstance(error.__cause__, ValueError) == (pg.rank() == 0)
        await check_still_works(pg)
        return text

    assert len(set(run_virtual(3, rank, options=DETAIL))) == 1


def test_wrong_number_of_arrays_on_all_ranks_is_reported_once() -> None:
    async def rank(pg: ProcessGroup) -> None:
        error = await mismatch_of(pg.scatter_object([1, 2], pg.rank()))
        assert "the following: root, number of ranks. Group" in str(error)
        error = await mismatch_of(pg.reduce_scatter(np.zeros(1), [np.ones(1)]))
        assert "number of ranks. Group 'world:0': ranks 0, 1, 2 called REDUCE_SCATTER(" in str(error)
        assert error.ranks == (0,)
        await check_still_works(pg)

    run_virtual(3, rank, options=DETAIL)


@pytest.mark.parametrize("kind", MISCOUNTED)
def test_wrong_number_of_arrays_in_a_single_rank_group_raises_a_value_error(kind: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(ValueError, match="per rank: 1, not 2"):
            MISCOUNTED[kind](pg, 2)

    run_virtual(1, rank, options=DETAIL)


# -- consecutive, concurrent and keyed calls


def test_consecutive_ordered_and_keyed_mismatches_are_all_raised() -> None:
    async def rank(pg: ProcessGroup) -> None:
        for turn in range(20):
            key = "k" if turn % 3 == 0 else None
            works = [
                pg.allreduce(np.zeros(pg.rank() + 1), key=key),
                pg.barrier(),
                pg.broadcast(np.zeros(1, "int32" if pg.rank() == 1 else "int64"), 0),
                pg.allreduce(np.ones(4), key=key),
            ]
            assert pg.pending() == [work for work in works if not work.done()]
            await mismatch_of(works[0])
            await mismatch_of(works[2])
            await works[1]
            assert (await works[3]).tolist() == [3.0] * 4
            await check_still_works(pg)

    for latency in (None, LATENCY):
        run_virtual(3, rank, options=DETAIL, latency=latency)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_calls_in_random_order_raise_equal_errors_on_all_ranks(seed: int) -> None:
    """Make ordered and keyed calls of all kinds over links with latency; some calls differ between ranks."""
    names = [*KINDS]

    async def rank(pg: ProcessGroup) -> list[str | None]:
        plan, own = random.Random(seed), random.Random(f"{seed} {pg.rank()}")
        works: list[Work[Any]] = []
        wanted = []
        for _ in range(60):
            name, odd = plan.choice(names), plan.choice(range(4 * pg.size()))
            wrong = plan.choice([other for other in names if other != name])
            works.append(KINDS[wrong if odd == pg.rank() else name](pg, Memory(pg.rank(), False)))  # type: ignore[arg-type]
            wanted.append(odd >= pg.size())
            if own.random() < 0.3:
                await asyncio.sleep(own.random() / 10)
        for work, good in zip(works, wanted, strict=True):
            await completion_of(work).wait_end()
            assert work.is_success() == good, work
        await check_still_works(pg)
        return [None if work.is_success() else str(work.exception()) for work in works]

    texts = run_virtual(4, rank, options=DETAIL, latency=LATENCY, seed=seed)
    assert all(each == texts[0] for each in texts)


@pytest.mark.parametrize("transport", LINKS)
async def test_large_keyed_calls_in_opposite_orders_complete(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        keys = ["a", "b"] if pg.rank() else ["b", "a"]
        arrays = {key: np.ones(500_000, "float32") for key in keys}
        works = [pg.allreduce(arrays[key], key=key) for key in keys]
        small = pg.allreduce(1)
        assert await small == pg.size()
        for work in works:
            assert (await work)[-1] == pg.size()

    await run_detailed(3, rank, transport=transport)


# -- blocks


async def make_calls_in_a_block(pg: ProcessGroup, *calls: Callable[[], Work[Any]]) -> None:
    async with pg.coalescing():
        for call in calls:
            call()


@pytest.mark.parametrize("transport", LINKS)
async def test_coalescing_block_with_debug_detail_is_compared_as_one_call(transport: str) -> None:
    """Check also that a block takes one sequence number on every rank, so that later calls match."""

    async def rank(pg: ProcessGroup) -> None:
        async with pg.coalescing() as batch:
            total, least = pg.allreduce(np.ones(3)), pg.allreduce(np.full(2, pg.rank() + 1), ReduceOp.MIN)
            text = pg.broadcast_object(f"of {pg.rank()}", 2)
            keyed = pg.allreduce(1, key="k")
            if pg.rank() < 2:
                word = pg.recv(np.zeros(1), 1 - pg.rank())
                pg.send(np.ones(1), 1 - pg.rank())
        assert batch.seq == 1
        assert (total.result().tolist(), least.result().tolist()) == ([3.0] * 3, [1, 1])
        assert (text.result(), keyed.result()) == ("of 2", 3)
        assert pg.rank() == 2 or word.result()[0] == 1
        assert (await pg.allreduce_coalesced([np.ones(1), np.ones(2)]))[1].tolist() == [3.0] * 2
        await check_still_works(pg)

    await run_detailed(3, rank, transport=transport)


def test_mismatch_of_coalescing_blocks_is_raised_on_all_ranks() -> None:
    """Let rank 1 omit or change the last of the 40 calls of a block."""

    async def rank(pg: ProcessGroup) -> None:
        for missing in (True, False):
            arrays = [np.full(each + 1, 1.0) for each in range(40)]
            if pg.rank() == 1:
                arrays[39:] = [] if missing else [arrays[39].astype("int32")]
            with pytest.raises(CollectiveMismatchError) as caught:
                await make_calls_in_a_block(pg, *(lambda array=array: pg.allreduce(array) for array in arrays))
            assert str(caught.value).startswith("Collectives differ in the following: members. Group")
            assert "ranks 0, 2 called COALESCED(members=[" in str(caught.value)
            theirs = "missing" if missing else "ALLREDUCE(dtype=int32, counts=[40]"
            assert ". member 39 is ALLREDUCE(dtype=float64, counts=[40]" in str(caught.value)
            assert f"on rank 0, {theirs}" in str(caught.value)
            assert all((array == 1).all() for array in arrays)
            await check_still_works(pg)

    for latency in (None, LATENCY):
        run_virtual(3, rank, options=DETAIL, latency=latency)


def test_keyed_calls_of_a_block_are_compared() -> None:
    async def rank(pg: ProcessGroup) -> None:
        good, other = np.ones(3), np.ones(3, "int32" if pg.rank() else "int64")
        with pytest.raises(CollectiveMismatchError, match=r"dtype\. Group .*key=k"):
            await make_calls_in_a_block(pg, lambda: pg.allreduce(good), lambda: pg.allreduce(other, key="k"))
        assert good.tolist() == [2.0] * 3
        assert (other == 1).all()
        await check_still_works(pg)

    run_virtual(2, rank, options=DETAIL)


# -- works


def test_cancelled_await_does_not_cancel_the_compared_call() -> None:
    async def rank(pg: ProcessGroup) -> None:
        work = pg.allreduce(np.ones(3) if pg.rank() else np.ones(4))
        later = pg.allreduce(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.gather(work)
        with pytest.raises(CollectiveMismatchError):
            await pg.drain()
        assert work.done()
        assert await later == 2

    run_virtual(2, rank, options=DETAIL, latency=LATENCY)


def test_mismatch_error_that_is_never_retrieved_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(pg: ProcessGroup) -> None:
        pg.broadcast(np.zeros(pg.rank() + 1), 0)
        await pg.barrier()

    with caplog.at_level(logging.ERROR, logger="aiocoll"):
        run_virtual(2, rank, options=DETAIL, allow_unretrieved=True)
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert "exception of BROADCAST (sequence 1) called at" in record.getMessage()
        assert "test_detail.py" in record.getMessage()


def test_mismatched_call_counts_as_incomplete_on_all_ranks() -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        await mismatch_of(pg.allreduce(np.zeros(pg.rank() + 1)))
        await mismatch_of(pg.allreduce(np.zeros(pg.rank() + 1), key="k"))
        await pg.allreduce(1, key="k")
        await pg.barrier()
        async with await pg.shrink() as smaller:
            assert smaller.completed_everywhere is not None
            assert smaller.completed_somewhere is not None
            for completed in (smaller.completed_everywhere, smaller.completed_somewhere):
                assert all(each in completed for each in (1, 3, ("k", 2)))
                assert 2 not in completed
                assert ("k", 1) not in completed
            # The group after the shrink also compares calls.
            await mismatch_of(smaller.allreduce(np.zeros(smaller.rank() + 1)))

    run_virtual(3, rank, options=DETAIL)


# -- missing ranks


@pytest.mark.parametrize("absent", [0, 1, 3])
@pytest.mark.parametrize("timeout", [2.0, 0.5])
def test_timeout_error_of_a_compared_call_names_ranks_that_never_call(absent: int, timeout: float) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == absent:
            await pg.wait_revoked()
            return
        started = now()
        with pytest.raises(CollectiveTimeoutError) as caught:
            await pg.allreduce(np.zeros((20, 10)), timeout=timeout)
        assert abs(now() - started - timeout) < 0.1
        assert caught.value.ranks == (absent,)
        assert f"it waits for rank {absent} (last in BARRIER(" in str(caught.value)
        assert "ALLREDUCE(shape=[20, 10]" in str(caught.value)
        assert "within" in str(caught.value)

    run_virtual(4, rank, options=DETAIL, latency=LATENCY)


def test_timeout_of_a_compared_call_covers_the_comparison_and_the_data_transfer() -> None:
    """Let rank 1 call after 3 s and rank 2 never call: rank 0's call must time out after 5 s."""

    async def rank(pg: ProcessGroup) -> None:
        work = None
        await asyncio.sleep(3 * pg.rank())
        started = now()
        if pg.rank() == 0:
            work = pg.barrier(timeout=5)
        elif pg.rank() == 1:
            work = pg.barrier()
        cause = await pg.wait_revoked()
        assert isinstance(cause, CollectiveTimeoutError)
        assert cause.ranks == (2,)
        assert work is None or isinstance(work.exception(), CollectiveTimeoutError)
        assert abs(now() - 5) < 0.1 or started > 5

    run_virtual(3, rank, options=DETAIL)


def test_stalled_comparison_logs_one_warning_that_names_the_missing_rank(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(40 if pg.rank() == 1 else 0)
        await pg.allreduce(np.zeros(3))

    with caplog.at_level(logging.WARNING, logger="aiocoll"):
        run_virtual(3, rank, options=DETAIL)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert all("ALLREDUCE (sequence 1)" in text and "waits for rank 1" in text for text in texts)


@pytest.mark.parametrize("transport", LINKS)
async def test_error_of_a_compared_call_names_a_rank_that_has_left_the_group(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 1:
            await pg.shutdown()
        else:
            with pytest.raises(PeerLostError) as caught:
                await pg.broadcast(np.zeros(1), 0)
            assert (caught.value.how, caught.value.ranks) == ("left", (1,))

    await run_detailed(3, rank, transport=transport)


def test_compared_monitored_barrier_names_the_missing_ranks() -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() in (1, 3):
            await pg.wait_revoked()
            return
        with pytest.raises(CollectiveTimeoutError) as caught:
            await pg.monitored_barrier(2.0 if pg.rank() == 0 else 3.0, wait_all_ranks=True)
        assert "[rank 0 of group" in str(caught.value)
        assert "Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms" in str(caught.value)
        assert (caught.value.ranks, caught.value.op, caught.value.seq) == ((1, 3), "MONITORED_BARRIER", 2)

    for latency in (None, LATENCY):
        run_virtual(4, rank, options=DETAIL, latency=latency)


# -- ranks with and without comparison


@pytest.mark.parametrize("kind", [*SIZED, "barrier", "gather", "scatter", "alltoall_object", "broadcast_object"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_rank_that_does_not_compare_calls_is_reported_as_a_mismatch(kind: str, odd: int) -> None:
    call: Call = KINDS[kind]

    async def rank(pg: ProcessGroup) -> None:
        # Change the options of this group, because groups made from it inherit them.
        options = GroupOptions.resolve(None if pg.rank() == odd else DETAIL, {})
        parts_of(pg).reconfigurer._spec = parts_of(pg).reconfigurer._spec._replace(options=options)
        other = await pg.split_group([0, 1, 2], group_name="mixed")
        assert other is not None
        memory = Memory(pg.rank(), pg.rank() == odd)
        work: Any = call(other, memory)
        started = now()
        cause = await other.wait_revoked()
        assert now() - started < 1.0
        assert isinstance(cause, CollectiveMismatchError)
        assert str(cause).startswith("Collectives differ in the following: debug")
        assert f"rank {odd} called" in str(cause)
        assert "debug=detail)" in str(cause)
        with pytest.raises(GroupRevokedError):
            other.barrier()
        assert work.exception() is None or isinstance(work.exception(), CollectiveMismatchError)
        memory.check(alone=pg.rank() != odd)
        await other.shutdown()

    for latency in (None, LATENCY):
        run_virtual(3, rank, options=GroupOptions(warn_after=30.0), latency=latency)


async def test_call_comparison_is_enabled_by_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await mismatch_of(pg.allreduce(np.zeros(pg.rank() + 1)))
        await check_still_works(pg)

    monkeypatch.setenv("AIOCOLL_DEBUG", "detail")
    await testing.run_ranks(2, rank, timeout=60)


# -- messages between two ranks


@pytest.mark.parametrize("transport", LINKS)
async def test_messages_are_compared_only_by_sender_and_receiver(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() < 2:
            other = 1 - pg.rank()
            got = np.zeros(3)
            await pg.batch([Send(np.full(3, 7.0), other), Recv(got, other)])
            assert got.tolist() == [7.0] * 3
            received = pg.recv_object(tag=2)
            await pg.send_object({"from": pg.rank()}, other, tag=2)
            assert await received == {"from": other}
            assert received.source_rank() == other
        await pg.barrier()

    await run_detailed(3, rank, transport=transport)


@pytest.mark.parametrize(("send", "receive", "fields"), P2P_TABLE[:4])
def test_mismatched_message_revokes_the_group(send: Call, receive: Call, fields: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        work = (send, receive)[pg.rank()](pg, Memory(pg.rank(), True))
        cause = await pg.wait_revoked()
        await asyncio.gather(work, return_exceptions=True)
        assert isinstance(cause, CollectiveMismatchError)
        assert f"following: {fields}" in str(cause)

    run_virtual(2, rank, options=DETAIL)


def test_custom_ops_are_compared_by_name() -> None:
    def subtract(a: Any, b: Any, out: Any) -> None:
        np.subtract(a, b, out)

    async def rank(pg: ProcessGroup) -> None:
        op = ReduceOp.custom(subtract, commutative=False, name="minus")
        array = np.array([2.0 ** -pg.rank()])
        await pg.allreduce(array, op)
        assert array[0] == 1.0 - 0.5 - 0.25
        error = await mismatch_of(pg.allreduce(array, op if pg.rank() else ReduceOp.SUM))
        assert "following: reduce. Group" in str(error)

    run_virtual(3, rank, options=DETAIL)


@pytest.mark.parametrize("kind", SIZED)
def test_small_call_on_one_rank_and_large_call_on_another_are_reported_as_a_mismatch(kind: str) -> None:
    case = Case(kind, "counts", counting(kind, 1_000_000, "uint8"), counting(kind, 1, "uint8"))
    for odd in (0, 1):
        check(case, run_virtual(2, mismatch_texts, case, odd, DELAYS["odd-late"], options=DETAIL))


async def test_arrays_of_compared_calls_are_released_without_garbage_collection() -> None:
    async def body(pg: ProcessGroup) -> None:
        for _ in range(2):
            array = np.ones(3)
            gone = weakref.ref(array)
            await pg.allreduce(array)
            del array
            await asyncio.sleep(0)
            assert gone() is None

    gc.disable()
    try:
        await run_detailed(3, body)
    finally:
        gc.enable()
