"""Statistics of a group, from `pg.stats()`: calls, bytes, waiting times for other ranks, and limits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupOptions,
    ProcessGroup,
    Recv,
    ReduceOp,
    Send,
    new_group,
)
from aiocoll.engine.journal import KNOWN
from aiocoll.group.stats import GroupStats, OperationStats, PeerStats
from aiocoll.store import HashStore
from aiocoll.testing import run_ranks, run_virtual

from ..gpu.groups import WAYS, gpus
from ..internals import comm_of, set_limits
from ..ranks import parametrize_transports

SIZES = (1, 2, 3, 4, 7)
#: The delay of a late rank in seconds, longer than one iteration of all event loops.
LATE = 0.1
#: The resolution of timers, in seconds.
CLOCK = 0.002
NOTHING = PeerStats(0, 0, 0.0, 0, 0.0, 0)


def by_op(stats: GroupStats) -> Mapping[str, tuple[int, int, int]]:
    """Return the numbers of calls, failures and bytes, by operation."""
    found: dict[str, tuple[int, int, int]] = {}
    for each in stats.operations:
        calls, failures, nbytes = found.get(each.op, (0, 0, 0))
        found[each.op] = calls + each.calls, failures + each.failures, nbytes + each.nbytes
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_stats_count_every_call_once(size: int, debug: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        me, ranks = pg.rank(), pg.size()
        begun = pg.stats()
        assert (begun.operations, begun.peers, begun.pending, begun.calls) == ((), (), 0, 0)
        for dtype in (np.float32, np.float64, np.int8):
            for shape in ((), (2, 3), (7,), (0,)):
                for _ in range(2):
                    await pg.allreduce(np.ones(shape, dtype), ReduceOp.MAX)
        await pg.allreduce(2.5, key="loss")
        await pg.broadcast(np.ones(3, np.int16), 0)
        await pg.allgather_into_tensor(np.ones(5 * ranks), np.ones(5))
        for count in (1, 9):
            await pg.allgather(None, np.ones(me + count))
        await pg.allgather_object(["any", me])
        await pg.barrier()
        async with pg.coalescing():
            pg.allreduce(np.ones(2))
            pg.allreduce(np.ones((2, 2), np.float32))
            pg.broadcast(np.ones(3, np.uint8), 0)
        await pg.allreduce_coalesced([np.ones(1), np.ones(2)])
        stats = pg.stats()
        gathered = 8 * (me + 1 + me + 9)
        assert by_op(stats) == {
            "ALLREDUCE": (25, 0, 2 * (1 + 6 + 7) * (4 + 8 + 1) + 8),
            "BROADCAST": (1, 0, 6),
            **(
                {"ALLGATHER": (3, 0, 40 + gathered)}
                if ranks == 1
                else {"ALLGATHER": (1, 0, 40), "ALLGATHER_ALLOCATED": (2, 0, gathered)}
            ),
            "ALLGATHER_OBJECT": (1, 0, 0),
            "BARRIER": (1, 0, 0),
            "COALESCED": (2, 0, 16 + 16 + 3 + 24),
        }
        assert (stats.group, stats.rank, stats.size) == (pg.group_name, me, ranks)
        assert (stats.calls, stats.failures, stats.pending, stats.oldest) == (33, 0, 0, 0.0)
        assert begun.since == stats.since <= begun.time <= stats.time
        for each in stats.operations:
            assert sum(calls for _, calls in each.histogram) == each.calls
            assert 0 <= each.seconds <= stats.calls * (stats.time - stats.since)
            lowest = sum(bound / 2 * calls for bound, calls in each.histogram)
            assert lowest <= each.seconds * 1.000001 + 1e-6 * each.calls
            assert each.seconds <= 2 * lowest
        assert all(each.rank != me for each in stats.peers)

    await run_ranks(size, rank, options=GroupOptions(debug=debug))


@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix", "tcp", "shm")
async def test_stats_contain_messages_algorithms_and_transports(pg: ProcessGroup, transport: str) -> None:
    other = 1 - pg.rank()
    await pg.allreduce(np.ones(1))  # opens the link
    for _ in range(3):
        await pg.allreduce(np.ones(6, np.float32))
    await pg.batch([Send(np.ones(5, np.int16), other), Recv(np.ones(5, np.int16), other)])
    await pg.batch([Send(np.ones(5, np.int16), other), Recv(np.ones(5, np.int16), other)])
    sent = pg.send(np.ones(5, np.int16), other)
    await pg.recv_anysource(np.ones(5, np.int16))
    await sent
    algorithm = "oneshot" if transport == "shm" else "exchange"
    reduced, *_, received, sends = pg.stats().operations
    assert (reduced.op, reduced.algorithm, reduced.transport) == ("ALLREDUCE", algorithm, transport)
    assert (received.op, received.algorithm, received.transport) == ("RECV", None, transport)
    assert (received.calls, received.nbytes) == (sends.calls, sends.nbytes) == (3, 30)
    assert sum(each.nbytes for each in pg.stats().operations if each.op == "ALLREDUCE") == 8 + 3 * 24


@pytest.mark.ranks(2)
async def test_stats_count_sparse_arrays_without_bytes(pg: ProcessGroup) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    await pg.allreduce(sparse.coo_array(np.eye(3)))
    assert by_op(pg.stats()) == {"ALLREDUCE_SPARSE": (1, 0, 0)}


@pytest.mark.parametrize("way", WAYS)
async def test_stats_count_calls_on_device_arrays(way: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()  # opens the link
        for _ in range(3):
            await pg.allreduce(gpu.tensor(np.ones((2, 3), np.float32), pg.rank()))
        transport = "nccl" if way == "nccl" else "memory"
        found = [(each.op, each.transport, each.calls, each.nbytes) for each in pg.stats().operations]
        assert found == [("ALLREDUCE", transport, 3, 72), ("BARRIER", "memory", 1, 0)]

    with gpus(2, way) as gpu:
        await run_ranks(2, rank)


@pytest.mark.ranks(2)
async def test_stats_count_failures_but_not_withdrawn_receives(pg: ProcessGroup) -> None:
    await pg.allreduce(np.ones(2))
    receive = asyncio.ensure_future(pg.recv(np.ones(1), 1 - pg.rank()).join())
    await asyncio.sleep(0)
    assert pg.stats().pending == 1
    receive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receive
    assert "RECV" not in by_op(pg.stats()) or pg.rank() == 2
    with pytest.raises(CollectiveTimeoutError):
        await pg.recv(np.ones(1), 1 - pg.rank(), timeout=0.01)
    with pytest.raises(CollectiveMismatchError):
        await pg.allreduce(np.ones(2 + pg.rank()))
    assert by_op(pg.stats()) == {"ALLREDUCE": (1, 1, 16), "RECV": (0, 1, 0)}
    assert pg.stats().failures == 2


async def test_stats_are_available_after_the_end_of_the_group() -> None:
    pg = await new_group(store=HashStore(), rank=0, world_size=1)
    pending = pg.recv(np.ones(1), 0) if pg.size() > 1 else pg.barrier()
    await pending
    pg.abort("the end")
    assert pg.stats().calls == 1
    await pg.shutdown()
    assert by_op(pg.stats()) == {"BARRIER": (1, 0, 0)}


@pytest.mark.ranks(2, options=GroupOptions(stats=False))
async def test_stats_can_be_disabled(pg: ProcessGroup) -> None:
    await pg.allreduce(1)
    await pg.batch([Send(np.ones(1), 1 - pg.rank()), Recv(np.ones(1), 1 - pg.rank())])
    part = await pg.split_group([0, 1])
    for each in (pg, part):
        assert each is not None
        with pytest.raises(RuntimeError, match=r"does not count its operations: .*GroupOptions\(stats=False\)"):
            each.stats()


# -- waits for other ranks


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
async def test_stats_attribute_waiting_time_to_the_last_rank(size: int, transport: Any) -> None:
    """Let each rank be the last one in turn; all others wait for it, directly or through another rank."""
    came = [asyncio.Event() for _ in range(size)]
    entered = [0] * size

    async def rank(pg: ProcessGroup) -> list[tuple[int, float] | None]:
        me, ranks, loop = pg.rank(), pg.size(), asyncio.get_running_loop()
        found: list[tuple[int, float] | None] = []
        await pg.allreduce(1)  # opens the links
        for last in range(ranks):
            await pg.barrier()
            before = {each.rank: each for each in pg.stats().peers}
            if me == last:
                await came[last].wait()
                late_enough = loop.create_future()
                loop.call_later(LATE, late_enough.set_result, None)
                await late_enough
            work = pg.allreduce(np.ones(4))
            entered[last] += 1
            if entered[last] == ranks - 1:
                came[last].set()
            await work
            new = [each for each in pg.stats().peers if each.times != before.get(each.rank, NOTHING).times]
            assert len(new) <= 1
            for each in new:
                old = before.get(each.rank, NOTHING)
                assert each.times == old.times + 1
                assert (each.recent_times, each.recent_seconds) == (each.times, pytest.approx(each.seconds))
                found.append((each.rank, each.seconds - old.seconds))
            if not new:
                found.append(None)
        assert pg.stats().waited == pytest.approx(sum(each.seconds for each in pg.stats().peers))
        return found

    found = await run_ranks(size, rank, options=GroupOptions(transport=transport))
    for last in range(size):
        round_ = [of_rank[last] for of_rank in found]
        for each in set(range(size)) - {last}:
            waited = round_[each]
            assert waited is not None
            assert waited[1] >= LATE - CLOCK
            if size < (5 if transport == "shm" else 4):
                assert waited[0] == last
            steps = 0
            while each != last:
                of_each = round_[each]
                assert of_each is not None
                each, steps = of_each[0], steps + 1
                assert steps < size
        mine = round_[last]
        assert mine is None or mine[1] < LATE


@pytest.mark.parametrize("op", ["gather", "gather without outputs", "scatter", "alltoall", "reduce", "broadcast"])
@pytest.mark.parametrize("count", [3, 70_000])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_stats_of_rank_0_attribute_waiting_time_to_a_late_rank_1(op: str, count: int, transport: Any) -> None:
    """Let rank 1 call only after rank 0 has called."""
    called = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        me, block = pg.rank(), np.ones(count)
        await pg.allreduce(1)  # opens the link
        await pg.barrier()
        before = {each.rank: each.times for each in pg.stats().peers}.get(1, 0)
        if me:
            await called.wait()
        work: Any = {
            "gather": lambda: pg.gather(None if me else [np.ones(count), np.ones(count)], block, 0),
            "gather without outputs": lambda: pg.gather(None, block, 0),
            "scatter": lambda: pg.scatter(block, [np.ones(count)] * 2 if me else None, 1),
            "alltoall": lambda: pg.alltoall(
                [np.ones(3), np.ones(3 if me else count)], [np.ones(count if me else 3), np.ones(3)]
            ),
            "reduce": lambda: pg.reduce(block, 0),
            "broadcast": lambda: pg.broadcast(block, 1),
        }[op]()
        called.set()
        await work
        if not me:
            assert {each.rank: each.times for each in pg.stats().peers}[1] == before + 1

    await run_ranks(2, rank, options=GroupOptions(transport=transport))


@pytest.mark.parametrize("op", ["gather", "gather_object"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_stats_attribute_waiting_time_to_a_late_rank_whose_data_is_unpacked_in_steps(
    op: str, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, loop_budget=0.0)
    called = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        me = pg.rank()
        await pg.barrier()
        before = {each.rank: each.times for each in pg.stats().peers}.get(1, 0)
        if me:
            await called.wait()
        work: Any = pg.gather(None, np.ones(70_000), 0) if op == "gather" else pg.gather_object([me] * 5000, 0)
        called.set()
        await work
        if not me:
            assert {each.rank: each.times for each in pg.stats().peers}[1] == before + 1

    await run_ranks(2, rank, options=GroupOptions(transport=transport))


@pytest.mark.ranks(2)
@parametrize_transports("memory", "shm", "tcp")
async def test_stats_of_a_broadcast_root_attribute_no_waiting_time(pg: ProcessGroup) -> None:
    if pg.rank():
        await pg.send(np.ones(2), 0)
        await pg.broadcast(np.ones(3), 0)
    else:
        await pg.recv(np.ones(2), 1)
        await pg.broadcast(np.ones(3), 0)
        assert pg.stats().peers == ()


def test_stats_attribute_no_waiting_time_to_a_rank_whose_data_came_early() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if not pg.rank():
            await asyncio.sleep(2)  # by now, the data of rank 1 has arrived
        await pg.broadcast(np.ones(3), 1)
        assert pg.rank() or pg.stats().peers == ()

    run_virtual(2, rank)


def test_stats_blame_a_rank_for_waiting_only_if_its_data_completes_a_call() -> None:
    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(2.0 * pg.rank())
        work = pg.allreduce(np.ones(2))
        if not pg.rank():
            await asyncio.sleep(3)  # by now, rank 1 has sent data, and rank 2 has not
            (operation,) = comm_of(pg).in_flight.pending
            assert (operation.awaited_ranks(), operation.waited_for) == ([2], -1)
        await work

    run_virtual(3, rank)


@pytest.mark.parametrize("debug", ["off", "detail"])
def test_stats_count_a_wait_for_one_of_several_operations_of_a_call_once(debug: Any) -> None:
    """Make a coalescing block, and a compared call: each consists of several operations."""

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank():
            await asyncio.sleep(2)
        async with pg.coalescing():
            pg.allreduce(np.ones(2))
            pg.allreduce(np.ones(2, np.float32))
        if not pg.rank():
            (each,) = pg.stats().peers
            assert (each.rank, each.times, each.seconds) == (1, 1, pytest.approx(2))

    run_virtual(2, rank, options=GroupOptions(debug=debug))


def test_recent_waits_in_stats_expire_after_a_minute_on_the_group_clock() -> None:
    async def rank(pg: ProcessGroup) -> list[tuple[int, float, int, float]]:
        found = []
        for pause in (0, 10, 45, 30, 61):
            await asyncio.sleep(pause)
            if pg.rank():
                await asyncio.sleep(2)
            await pg.barrier()
            if not pg.rank():
                (each,) = pg.stats().peers
                found.append((each.times, round(each.seconds, 3), each.recent_times, round(each.recent_seconds, 3)))
        return found

    found, _ = run_virtual(2, rank)
    assert found == [(1, 2, 1, 2), (2, 4, 2, 4), (3, 6, 3, 6), (4, 8, 2, 4), (5, 10, 1, 2)]


def test_stats_list_the_currently_missing_ranks() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 2:
            await asyncio.sleep(8)
        work = pg.allreduce(1)
        if pg.rank() != 2:
            await asyncio.sleep(3)
            stats = pg.stats()
            assert [(each.rank, each.missing) for each in stats.peers if each.missing] == [(2, 1)]
            assert stats.pending == 1
            assert stats.oldest == pytest.approx(3, abs=0.1)
            assert "1 pending for up to 3" in str(stats)
        await work
        assert all(each.missing == 0 for each in pg.stats().peers)

    run_virtual(3, rank)


# -- limits


@pytest.mark.ranks(1)
async def test_stats_tables_have_a_limited_size(pg: ProcessGroup) -> None:
    for count in range(2 * KNOWN + 3):
        await pg.allreduce(np.ones(count))
    assert len(comm_of(pg).journal._calls) <= KNOWN
    (row,) = pg.stats().operations
    assert (row.calls, row.nbytes) == (2 * KNOWN + 3, 8 * (2 * KNOWN + 2) * (2 * KNOWN + 3) // 2)


async def test_stats_can_be_read_by_another_thread_during_calls() -> None:
    failures: list[BaseException] = []

    async def rank(pg: ProcessGroup) -> None:
        ended = threading.Event()

        def read() -> None:
            try:
                last = 0
                while not ended.is_set():
                    stats = pg.stats()
                    assert stats.calls >= last
                    last = stats.calls
                    str(stats)
            except BaseException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(300):
            await pg.allreduce(np.ones(number % 7))
            await pg.allgather_object(number)
        ended.set()
        await asyncio.to_thread(reader.join)

    await run_ranks(2, rank)
    assert failures == []


# -- the returned statistics


def row(histogram: tuple[tuple[float, int], ...]) -> OperationStats:
    calls = sum(each for _, each in histogram)
    return OperationStats("ALLREDUCE", "ring", "tcp", calls, 0, 8 * calls, 1.0, histogram)


def test_stats_quantiles_are_computed_from_the_histogram_buckets() -> None:
    assert row(()).p50 is row(()).p99 is None
    assert row(((2.0, 1),)).quantile(0) == 1.0
    assert row(((2.0, 1),)).quantile(1) == 2.0
    several = row(((0.5, 50), (4.0, 49), (8.0, 1)))
    assert several.p50 == 0.5
    assert several.p99 == 4.0
    assert several.quantile(1) == 8.0
    assert several.quantile(0.25) == 0.375
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"q=.*: must be from 0 to 1"):
            several.quantile(wrong)


@pytest.mark.ranks(2)
async def test_stats_are_immutable_plain_data_that_print_as_a_table(pg: ProcessGroup) -> None:
    await pg.allreduce(np.ones(256, np.float32))
    await pg.barrier()
    stats = pg.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.pending = 3  # type: ignore[misc]
    data = stats.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["operations"][0]["calls"] == 1
    assert data["operations"][0]["p99"] == stats.operations[0].p99
    first, head, reduced, barrier, *peers = str(stats).splitlines()
    assert first.startswith(f"group {pg.group_name}, rank {pg.rank()} of 2: 2 operations, 0 failed, in ")
    assert head.split() == [
        *("operation", "algorithm", "transport"),
        *("calls", "failed", "bytes", "seconds", "p50", "p99"),
    ]
    assert reduced.split()[:7] == ["ALLREDUCE", "exchange", "memory", "1", "0", "1", "KiB"]
    assert barrier.split()[:7] == ["BARRIER", "dissemination", "memory", "1", "0", "0", "B"]
    assert [line.split()[:2] for line in peers[1:]] == [["rank", str(each.rank)] for each in stats.peers]
