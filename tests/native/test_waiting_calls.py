"""Native calls that wait for shared-memory slots, because earlier calls of their group still use these slots."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, CollectiveTimeoutError, GroupError, ProcessGroup, ReduceOp
from aiocoll.transport.shared_memory import SMALL_SLOTS
from aiocoll.work import Work

from ..internals import Limits, comm_of, is_native, native_calls_of, use_same_slots
from ..ranks import wait_until
from .groups import await_work, group_of_ranks, pending_in_python

#: The number of calls: twice the number of slots, so that half of them wait.
CALLS = 2 * SMALL_SLOTS


@pytest.fixture(autouse=True)
def no_handover(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    """Turn off the handover of slow and waiting calls, since any call may be slow on a loaded machine."""
    limits(report_after=1000.0, report_strays_after=1000.0)
    monkeypatch.setattr("aiocoll.engine.native_calls.MAX_WAIT", 1000.0)


@pytest.fixture
def immediate_handover(monkeypatch: pytest.MonkeyPatch, no_handover: None) -> None:
    """Make the accelerator hand waiting calls over to Python in the next loop iteration."""
    monkeypatch.setattr("aiocoll.engine.native_calls.MAX_WAIT", 0.0)


def start_allreduces(pg: ProcessGroup, count: int = CALLS) -> list[tuple[np.ndarray, Work[Any]]]:
    """Start `count` allreduces; the array of call n on rank r is filled with n + r."""
    arrays = [np.full(3, float(number + pg.rank())) for number in range(count)]
    return [(array, pg.allreduce(array)) for array in arrays]


def counted_calls(pg: ProcessGroup) -> int:
    return sum(each.calls for each in pg.stats().operations)


async def check_sums(pgs: list[ProcessGroup], started: list[list[tuple[np.ndarray, Work[Any]]]]) -> None:
    size = len(pgs)
    async with asyncio.timeout(20):
        for calls in started:
            for number, (array, work) in enumerate(calls):
                await await_work(work)
                assert (array == size * number + size * (size - 1) / 2).all()


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_native_calls_that_wait_for_a_slot_are_not_handed_over(size: int) -> None:
    async with group_of_ranks([True] * size) as pgs:
        started = [start_allreduces(pg) for pg in pgs]
        assert native_calls_of(pgs[0]).waiting == CALLS - SMALL_SLOTS
        await check_sums(pgs, started)
        assert all(is_native(work) for calls in started for _, work in calls)
        assert [native_calls_of(pg).waiting for pg in pgs] == [0] * size


async def test_last_waiting_native_call_ends_after_the_earlier_calls() -> None:
    async with group_of_ranks([True, True]) as pgs:
        zero, one = [start_allreduces(pg) for pg in pgs]
        await await_work(zero[-1][1])
        assert all(work.done() for _, work in zero)
        await check_sums(pgs, [zero, one])


async def test_native_root_that_runs_ahead_waits_for_its_reader() -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        sent = [np.full(5, float(number)) for number in range(CALLS)]
        got = [np.zeros(5) for _ in sent]
        works = [zero.broadcast(array, 0) for array in sent]
        assert sum(work.done() for work in works) == SMALL_SLOTS
        works += [one.broadcast(array, 0) for array in got]
        async with asyncio.timeout(20):
            for work in works:
                await await_work(work)
        assert all(map(is_native, works))
        assert np.array_equal(sent, got)


@pytest.mark.parametrize("peer", [True, False], ids=["native peer", "pure peer"])
async def test_native_calls_use_frames_if_no_slot_becomes_free(immediate_handover: None, peer: bool) -> None:
    async with group_of_ranks([True, peer]) as pgs:
        zero = start_allreduces(pgs[0])
        await wait_until(lambda: not native_calls_of(pgs[0]).waiting)
        assert [is_native(work) for _, work in zero] == [True] * SMALL_SLOTS + [False] * (CALLS - SMALL_SLOTS)
        # After a handover, further calls use frames until a call finds a free slot again.
        array = np.full(3, float(CALLS))
        work = pgs[0].allreduce(array)
        assert not is_native(work)
        zero.append((array, work))
        await check_sums(pgs, [zero, start_allreduces(pgs[1], CALLS + 1)])
        again = [start_allreduces(pg, 1) for pg in pgs]
        assert is_native(again[0][0][1])
        await check_sums(pgs, again)


async def test_call_that_uses_frames_is_reduced_without_the_warnings_of_the_caller(immediate_handover: None) -> None:
    async with group_of_ranks([True, True]) as pgs:
        with np.errstate(all="raise"):
            works = [pgs[0].allreduce(np.full(3, np.inf)) for _ in range(CALLS)]
            await wait_until(lambda: not native_calls_of(pgs[0]).waiting)
            works += [pgs[1].allreduce(np.full(3, -np.inf)) for _ in range(CALLS)]
            async with asyncio.timeout(20):
                for work in works:
                    assert np.isnan(await await_work(work)).all()


async def test_inspection_of_a_waiting_native_call_hands_the_call_over() -> None:
    async with group_of_ranks([True, True]) as pgs:
        zero = start_allreduces(pgs[0])
        for _, work in (zero[-1], zero[SMALL_SLOTS], zero[SMALL_SLOTS + 5]):
            assert "ALLREDUCE" in repr(work)
            assert not is_native(work)
        assert native_calls_of(pgs[0]).waiting == CALLS - SMALL_SLOTS - 3
        assert pending_in_python(pgs[0]) == 3
        await check_sums(pgs, [zero, start_allreduces(pgs[1])])


async def test_waiting_native_call_is_listed_as_in_flight() -> None:
    """Check a waiting broadcast, which the table of calls in flight must list.

    A broadcast finishes on its root as soon as it is posted. Without a record, it would count as never made.
    """
    async with group_of_ranks([True, True]) as (zero, one):
        works = [zero.broadcast(np.full(5, float(number)), 0) for number in range(CALLS)]
        last = works[-1].seq
        assert last is not None
        found = comm_of(zero).in_flight.find(last)
        assert found is not None
        assert not found.done
        works += [one.broadcast(np.zeros(5), 0) for _ in range(CALLS)]
        async with asyncio.timeout(20):
            for work in works:
                await await_work(work)


async def test_keyed_native_call_does_not_wait_for_other_calls() -> None:
    async with group_of_ranks([True, True]) as pgs:
        zero = start_allreduces(pgs[0])
        keyed = [pg.allreduce(np.ones(3), key="step") for pg in pgs]
        assert (await await_work(keyed[0]) == 2).all()
        assert native_calls_of(pgs[0]).waiting > 0
        await check_sums(pgs, [zero, start_allreduces(pgs[1])])
        await await_work(keyed[1])


async def test_native_call_of_another_group_does_not_wait_for_a_slot() -> None:
    """Check that a call uses frames if another group, whose ranks are late, occupies the slot of this call."""
    async with group_of_ranks([True, True]) as pgs:
        others = [pg for pg in await asyncio.gather(*(pg.split(0) for pg in pgs)) if pg is not None]
        for pg in (*pgs, *others):
            use_same_slots(pg)
        zero = start_allreduces(pgs[0])
        calls = [start_allreduces(pg, 1) for pg in others]
        assert native_calls_of(others[0]).waiting == 0
        await check_sums(others, calls)
        assert native_calls_of(pgs[0]).waiting == CALLS - SMALL_SLOTS
        await check_sums(pgs, [zero, start_allreduces(pgs[1])])
        await asyncio.gather(*(pg.shutdown() for pg in others))


async def test_mismatch_error_names_the_waiting_native_call() -> None:
    async with group_of_ranks([True, True]) as pgs:
        zero = start_allreduces(pgs[0])
        one = [pgs[1].allreduce(np.ones(4 if number == CALLS - 1 else 3)) for number in range(CALLS)]
        for work in (zero[-1][1], one[-1]):
            with pytest.raises(CollectiveMismatchError, match=f"shape.*SequenceNumber={1 + CALLS}"):
                await work
        for _, work in zero[:-1]:
            await await_work(work)
        for work in one[:-1]:
            await work


async def test_waiting_native_calls_fail_if_their_group_fails() -> None:
    async with group_of_ranks([True, True]) as pgs:
        zero = start_allreduces(pgs[0])
        pgs[1].abort()
        for _, work in zero:
            with pytest.raises(GroupError):
                await work
        assert len(comm_of(pgs[0]).in_flight) == 0


async def test_waiting_native_calls_time_out(limits: Limits) -> None:
    limits(report_after=0.05)
    async with group_of_ranks([True, True], timeout=0.3) as pgs:
        zero = start_allreduces(pgs[0])
        assert native_calls_of(pgs[0]).waiting > 0
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            await zero[-1][1]
        for _, work in zero[:-1]:
            with pytest.raises(GroupError):
                await work


async def test_waiting_native_calls_fail_when_their_group_is_closed() -> None:
    async with group_of_ranks([True, True]) as pgs:
        zero = start_allreduces(pgs[0])
        pgs[0].abort()
        assert all(work.done() for _, work in zero)
        assert all(isinstance(work.exception(), GroupError) for _, work in zero)


async def test_waiting_native_calls_are_recorded_and_counted() -> None:
    async with group_of_ranks([True, True]) as pgs:
        before = counted_calls(pgs[0])
        started = [start_allreduces(pg) for pg in pgs]
        assert len(comm_of(pgs[0]).in_flight.snapshot()) == CALLS
        assert native_calls_of(pgs[0]).count == CALLS, "a call was handed over to Python"
        await check_sums(pgs, started)
        assert counted_calls(pgs[0]) == before + CALLS


@pytest.mark.parametrize("stays_native", [True, False])
async def test_calls_with_a_python_reduction_can_wait_for_a_slot(
    stays_native: bool, monkeypatch: pytest.MonkeyPatch, no_handover: None
) -> None:
    """Check that waiting calls can finish while Python code of the engine runs in its context."""
    if not stays_native:
        monkeypatch.setattr("aiocoll.engine.native_calls.MAX_WAIT", 0.0)
    async with group_of_ranks([True, True]) as (zero, one):
        arrays = [np.full(3, float(number)) for number in range(CALLS)]
        works = [zero.allreduce(array, ReduceOp.AVG) for array in arrays]
        assert native_calls_of(zero).waiting > 0

        async def call_slowly() -> None:
            for number in range(CALLS):
                one.allreduce(np.full(3, number + 2.0), ReduceOp.AVG)
                await asyncio.sleep(0)

        async with asyncio.timeout(20):
            task = asyncio.create_task(call_slowly())
            for work in works:
                await work
            await task
        assert [array[0] for array in arrays] == [number + 1.0 for number in range(CALLS)]
