"""Calls that Python carries out: the accelerator declines the call, or hands the call over to Python later."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    GroupOptions,
    GroupRevokedError,
    ProcessGroup,
    ReduceOp,
    testing,
)
from aiocoll.transport.shared_memory import SMALL_SLOTS
from aiocoll.work import Work

from ..internals import Limits, comm_of, disable_accelerator, is_native, native_calls_of, use_same_slots
from ..ranks import wait_until
from .groups import group_of_ranks, pending_in_python

Ranks = tuple[ProcessGroup, ProcessGroup]


@pytest.fixture(params=["native peer", "pure peer"])
async def ranks(request: pytest.FixtureRequest, limits: Limits) -> AsyncIterator[Ranks]:
    """Yield rank 0, which uses the accelerator, and rank 1, with or without the accelerator."""
    limits(report_strays_after=1000.0)
    async with group_of_ranks([True, request.param == "native peer"]) as (zero, one):
        yield zero, one


def ones(count: int = 3) -> np.ndarray:
    return np.ones(count)


async def await_all(*works: Work[Any]) -> None:
    async with asyncio.timeout(20):
        for work in works:
            await work


async def check_next_call_is_native(ranks: Ranks) -> None:
    """Check that the accelerator carries out the next call of rank 0."""
    zero, one = ranks
    work = zero.allreduce(ones())
    assert is_native(work)
    assert (native_calls_of(zero).count, pending_in_python(zero)) == (1, 0)
    await await_all(one.allreduce(ones()), work)
    assert is_native(work)


async def test_hook_prevents_native_calls_until_the_hook_is_removed(ranks: Ranks) -> None:
    zero, one = ranks
    seen: list[str] = []

    class Hook:
        def on_start(self, info: Any) -> None:
            seen.append(f"start {info.op}")

        def on_end(self, info: Any) -> None:
            seen.append(f"end {info.op}")

    before = zero.allreduce(ones())
    handle = zero.add_hook(Hook())
    work = zero.allreduce(ones())
    assert (is_native(before), is_native(work)) == (True, False)
    await await_all(one.allreduce(ones()), one.allreduce(ones()), before, work)
    assert seen == ["start ALLREDUCE", "end ALLREDUCE"], "the hook saw other calls than the one after `add_hook`"
    handle.remove()
    await check_next_call_is_native(ranks)


@pytest.mark.parametrize(
    ("timeout", "native"), [(0.1, False), (0.5, True), (5.0, True), (60, True), (float("inf"), True)]
)
async def test_call_with_a_short_timeout_is_not_native(ranks: Ranks, timeout: float, native: bool) -> None:
    zero, one = ranks
    works = [zero.allreduce(ones(), timeout=timeout), zero.allreduce(ones(), timeout=timeout, key="step")]
    works.append(zero.allgather_into_tensor(ones(6), ones(), timeout=timeout))
    assert [is_native(work) for work in works] == [native] * 3
    await await_all(one.allreduce(ones()), one.allreduce(ones(), key="step"))
    await await_all(one.allgather_into_tensor(ones(6), ones()), *works)


async def test_timeout_of_a_native_call_expires_in_time() -> None:
    """Check a call with a different timeout than the group's: a timer hands the call over to Python, then fails it.

    The timer runs every 0.25 s, which bounds the delay.
    """
    async with group_of_ranks([True, True]) as (zero, _):
        await wait_until(lambda: not comm_of(zero).endpoint.watch.armed[0])  # wait until the timer is idle
        works = [zero.allreduce(ones(), timeout=timeout) for timeout in (None, 0.6, 30.0)]
        assert all(map(is_native, works))
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"within 0\.6 s"):
            await works[1]
        assert 0.55 < time.monotonic() - start < 0.85


async def test_changed_group_timeout_applies_to_later_native_calls(ranks: Ranks, limits: Limits) -> None:
    zero, _one = ranks
    zero.timeout = 0.3
    await check_next_call_is_native(ranks)
    work = zero.allreduce(ones())
    assert is_native(work)
    with pytest.raises(CollectiveTimeoutError, match=r"within 0\.3 s[\s\S]*rank 1|rank 1[\s\S]*within 0\.3 s"):
        await work


async def test_group_with_a_short_timeout_makes_no_native_calls(ranks: Ranks) -> None:
    zero, one = ranks
    zero.timeout = 0.1
    work = zero.allreduce(ones())
    assert not is_native(work)
    await await_all(one.allreduce(ones()), work)
    zero.timeout = 30
    await check_next_call_is_native(ranks)


async def test_coalescing_block_records_calls_instead_of_the_accelerator(ranks: Ranks) -> None:
    zero, one = ranks
    arrays = [ones() for _ in range(4)]
    async with asyncio.timeout(20):
        await asyncio.gather(*(make_block(pg, arrays[2 * place : 2 * place + 2]) for place, pg in enumerate(ranks)))
    assert all((array == 2).all() for array in arrays)
    with pytest.raises(ZeroDivisionError):
        await make_block(zero, [])
    await check_next_call_is_native((zero, one))


async def make_block(pg: ProcessGroup, arrays: list[np.ndarray]) -> None:
    async with pg.coalescing():
        works = [pg.allreduce(array) for array in arrays]
        parts = pg.allgather_into_tensor(ones(6), ones())
        assert not any(work.done() for work in (*works, parts))
        assert native_calls_of(pg) is None or native_calls_of(pg).count == 0
        if not arrays:
            raise ZeroDivisionError


async def test_time_estimator_takes_calls_instead_of_the_accelerator(ranks: Ranks) -> None:
    zero, _ = ranks
    entered = comm_of(zero).entered
    with zero.time_estimator() as estimate:
        await zero.allreduce(ones())
        await zero.allgather_into_tensor(ones(6), ones())
    assert [call.op for call in estimate.calls] == ["ALLREDUCE", "ALLGATHER"]
    assert comm_of(zero).entered == entered
    await check_next_call_is_native(ranks)


async def test_compared_calls_are_not_native() -> None:
    async def rank(pg: ProcessGroup) -> None:
        for _ in range(3):
            work = pg.allreduce(ones())
            assert not is_native(work)
            assert (await work == 2).all()

    await testing.run_ranks(2, rank, options=GroupOptions(transport="shm", debug="detail"))


async def test_early_frames_prevent_native_calls_until_the_frames_are_taken(ranks: Ranks) -> None:
    zero, one = ranks
    keys = [f"layer {number}" for number in range(3 * SMALL_SLOTS)]
    early = [one.allreduce(ones(), key=key) for key in keys]  # more calls than slots, so the last calls use frames
    await wait_until(lambda: comm_of(zero).early)
    work = zero.allreduce(ones())
    assert not is_native(work)
    await await_all(one.allreduce(ones()), work)
    await await_all(*(zero.allreduce(ones(), key=key) for key in keys), *early)
    assert not comm_of(zero).early
    await check_next_call_is_native(ranks)


async def test_calls_on_unusual_arrays_give_correct_results_in_native_groups(ranks: Ranks) -> None:
    """Use strided, Fortran-ordered and other unusual arrays, for which the accelerator may decline the call."""
    zero, one = ranks
    for make in (
        lambda: np.ones(6)[::2],
        lambda: np.asfortranarray(np.ones((2, 3))),
        lambda: np.ones((1, 1, 1, 1, 2)),
        lambda: np.ones(()),
        lambda: np.ma.array(np.ones(3)).data,
        lambda: np.ones(3).view(np.recarray),
        lambda: np.ones(2_000_000),
        lambda: bytearray(np.ones(3).tobytes()),
    ):
        arrays = make(), make()
        await await_all(*(pg.broadcast(array, 0) for pg, array in zip(ranks, arrays, strict=True)))
        assert np.array_equal(np.asarray(arrays[0]), np.asarray(arrays[1]))
        if not isinstance(arrays[0], bytearray):
            await await_all(*(pg.allreduce(array) for pg, array in zip(ranks, arrays, strict=True)))
            assert (np.asarray(arrays[0]) == 2).all()
    assert [await work for work in [pg.allreduce(2.5) for pg in ranks]] == [5.0, 5.0]
    assert pending_in_python(zero) == pending_in_python(one) == 0


async def test_native_call_with_wrong_arguments_takes_no_sequence_number(ranks: Ranks) -> None:
    zero, one = ranks
    array = ones()
    array.flags.writeable = False
    entered = comm_of(zero).entered
    for call in (
        lambda: zero.allreduce(array),
        lambda: zero.broadcast(array, 1),
        lambda: zero.allgather_into_tensor(array, ones(1)),
        lambda: zero.allreduce(np.ones(3), "SUM"),  # type: ignore[arg-type]
        lambda: zero.broadcast(ones(), 2),
        lambda: zero.broadcast(ones(), "0"),  # type: ignore[arg-type]
        lambda: zero.broadcast(ones(), None),  # type: ignore[arg-type]
        lambda: zero.allgather_into_tensor(ones(5), ones()),
        lambda: zero.alltoall_base(ones(4), ones(5)),
        lambda: zero.alltoall_base(ones(5), ones(5)),
        lambda: zero.reduce_scatter_tensor(ones(2), ones(6)),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert comm_of(zero).entered == entered
    works = zero.broadcast(array, 0), one.broadcast(ones(), 0)
    await await_all(*works)


async def test_native_calls_with_overlapping_parts_give_correct_results(ranks: Ranks) -> None:
    whole = [np.zeros(6), np.zeros(6)]
    works = []
    for pg, array in zip(ranks, whole, strict=True):
        part = array[3 * pg.rank() : 3 * pg.rank() + 3]
        part[:] = pg.rank() + 1
        works.append(pg.allgather_into_tensor(array, part))
    await await_all(*works)
    assert whole[0].tolist() == whole[1].tolist() == [1, 1, 1, 2, 2, 2]


async def test_key_can_be_reused_while_its_native_call_is_in_flight(ranks: Ranks) -> None:
    zero, one = ranks
    arrays = [np.full(2, float(number)) for number in range(3)]
    works = [zero.allreduce(array, key="step") for array in arrays]
    assert all(map(is_native, works))
    await await_all(*(one.allreduce(np.zeros(2), key="step") for _ in range(3)), *works)
    assert [work.seq for work in works] == [1, 2, 3]
    assert [array[0] for array in arrays] == [0, 1, 2]
    assert zero.allreduce(ones(), key="other").seq == 1
    await await_all(one.allreduce(ones(), key="other"))


async def test_key_that_is_not_a_string_is_refused(ranks: Ranks) -> None:
    zero, _ = ranks
    for key in (1, b"step"):
        with pytest.raises(TypeError, match="key must be a str or None"):
            zero.allreduce(ones(), key=key)  # type: ignore[arg-type]
    await check_next_call_is_native(ranks)


CALLS: list[Callable[[ProcessGroup], Any]] = [
    lambda pg: pg.allreduce(ones()),
    lambda pg: pg.barrier(),
    lambda pg: pg.allgather_into_tensor(ones(6), ones()),
    lambda pg: pg.reduce_scatter_tensor(ones(), ones(6)),
    lambda pg: pg.alltoall_base(ones(6), ones(6)),
    lambda pg: pg.allgather([ones(), ones()], ones()),
    lambda pg: pg.allreduce(ones(), key="key"),
    lambda pg: pg.scan(ones()),
]


async def test_native_group_refuses_calls_from_other_threads_and_loops(ranks: Ranks) -> None:
    zero, one = ranks
    for call in CALLS:  # fill the call cache with the plan of each call
        await await_all(call(zero), call(one))
    entered = comm_of(zero).entered

    def other() -> None:
        for call in CALLS:
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                call(zero)

    async def other_loop() -> None:
        other()

    await asyncio.to_thread(other)
    await asyncio.to_thread(asyncio.run, other_loop())
    assert comm_of(zero).entered == entered
    assert (native_calls_of(zero).count, pending_in_python(zero)) == (0, 0)
    await check_next_call_is_native(ranks)


async def test_revoked_native_group_refuses_calls(ranks: Ranks) -> None:
    zero, one = ranks
    for call in CALLS:
        await await_all(call(zero), call(one))
    one.abort("a test")
    await zero.wait_revoked()
    for call in CALLS:
        with pytest.raises(GroupRevokedError):
            call(zero)
    assert (native_calls_of(zero).count, pending_in_python(zero)) == (0, 0)


async def test_closed_native_group_refuses_calls(ranks: Ranks) -> None:
    zero, one = ranks
    for call in CALLS:
        await await_all(call(zero), call(one))
    await asyncio.gather(zero.shutdown(), one.shutdown())
    for call in CALLS:
        with pytest.raises(GroupClosedError):
            call(zero)


async def test_error_of_a_native_call_names_a_rank_that_has_left() -> None:
    async with group_of_ranks([True, True, True]) as (zero, one, two):
        await await_all(*(pg.allreduce(ones()) for pg in (zero, one, two)))
        await two.shutdown()
        await wait_until(lambda: comm_of(zero).left)
        work = zero.allreduce(ones())
        assert not is_native(work)
        with pytest.raises(GroupError, match="rank 2"):
            await work
        with pytest.raises(GroupError):
            await one.allreduce(ones())


async def test_frame_instead_of_a_shared_memory_post_hands_a_native_call_over() -> None:
    async with group_of_ranks([True, True]) as (a_zero, a_one):
        b_zero, b_one = await asyncio.gather(a_zero.split(0), a_one.split(0))
        assert b_zero is not None
        assert b_one is not None
        for pg in (a_zero, a_one, b_zero, b_one):
            use_same_slots(pg)
        while comm_of(b_one).entered < comm_of(a_one).entered:  # call until the next calls of both groups share a slot
            await await_all(b_zero.barrier(), b_one.barrier())
        while comm_of(a_one).entered < comm_of(b_one).entered:
            await await_all(a_zero.barrier(), a_one.barrier())
        first, waiting = a_one.allreduce(ones()), b_zero.allreduce(ones())
        assert (is_native(first), is_native(waiting)) == (True, True)
        late = b_one.allreduce(ones())
        assert not is_native(late), "the call used a slot that holds a call of the other group"
        await await_all(late, waiting)
        assert not is_native(waiting), "the call stayed native although a frame arrived for it"
        await await_all(a_zero.allreduce(ones()), first)
        assert is_native(first)
        await await_all(b_zero.allreduce(ones()), b_one.allreduce(ones()))
        await asyncio.gather(b_zero.shutdown(), b_one.shutdown())


#: Calls that mismatch an allreduce of three float64 elements by SUM.
OTHERS: dict[str, Callable[..., Any]] = {
    "kind": lambda pg, **key: pg.broadcast(ones(), 0, **key),
    "op": lambda pg, **key: pg.allreduce(ones(), ReduceOp.MAX, **key),
    "shape": lambda pg, **key: pg.allreduce(ones(4), **key),
    "dtype": lambda pg, **key: pg.allreduce(np.ones(3, np.int64), **key),
    "barrier": lambda pg, **key: pg.barrier(**key),
    "parts": lambda pg, **key: pg.allgather_into_tensor(ones(6), ones(), **key),
    "large": lambda pg, **key: pg.allreduce(ones(20_000), **key),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("key", [{}, {"key": "step"}], ids=["ordered", "keyed"])
@pytest.mark.parametrize("peer", [True, False], ids=["native peer", "pure peer"])
async def test_native_mismatch_is_reported_within_a_second_on_both_ranks(
    other: str, first: int, key: dict[str, str], peer: bool
) -> None:
    async with group_of_ranks([True, peer]) as (zero, one):
        array = ones()
        starts = [lambda: zero.allreduce(array, **key), lambda: OTHERS[other](one, **key)]
        works = [starts[first](), starts[1 - first]()]
        start = time.monotonic()
        async with asyncio.timeout(5):
            found = await asyncio.gather(*works, return_exceptions=True)
        took = time.monotonic() - start
        assert {type(each) for each in found} == {CollectiveMismatchError}, found
        assert took < 1
        for each in found:
            assert "ALLREDUCE" in str(each)
            assert "rank 0" in str(each)
            assert "rank 1" in str(each)
        assert (array == 1).all(), "a byte of the mismatching call is in the array"


async def test_different_roots_of_native_calls_are_reported(ranks: Ranks) -> None:
    zero, one = ranks
    works = [one.broadcast(ones(), 0), zero.broadcast(ones(), 1)]
    async with asyncio.timeout(1):
        found = await asyncio.gather(*works, return_exceptions=True)
    assert {type(each) for each in found} == {CollectiveMismatchError}
    assert all("root=0" in str(each) and "root=1" in str(each) for each in found), found


async def test_mismatch_with_a_finished_native_broadcast_root_is_reported() -> None:
    """Check that rank 1 reports the mismatch although the broadcast's root has already finished its call."""
    async with group_of_ranks([True, True]) as (zero, one):
        done = zero.broadcast(ones(), 0)
        assert done.done()
        assert is_native(done)
        async with asyncio.timeout(1):
            with pytest.raises(CollectiveMismatchError) as raised:
                await one.allreduce(ones())
            assert "BROADCAST" in str(raised.value)
            await zero.wait_revoked()
            with pytest.raises(GroupRevokedError):
                zero.barrier()


async def test_timeout_error_of_a_native_call_names_the_rank_that_never_calls() -> None:
    async with group_of_ranks([True, True, True], timeout=0.4) as (zero, one, _):
        works = [zero.allreduce(ones()), one.allreduce(ones())]
        assert all(map(is_native, works))
        start = time.monotonic()
        found = await asyncio.gather(*works, return_exceptions=True)
        assert 0.35 < time.monotonic() - start < 3
        assert any(isinstance(each, CollectiveTimeoutError) for each in found)
        for each in found:
            assert re.search(r"\brank(\(s\))? 2\b", str(each))
            assert "ALLREDUCE" in str(each)


def comparable_entries(pg: ProcessGroup) -> list[Any]:
    """Return a rank's flight recorder entries without the fields that differ between groups, such as times."""
    varying = ("entered", "started", "finished", "id", "site", "group")
    return [
        {name: value for name, value in each.items() if name not in varying} for each in pg.recorder.dump()["entries"]
    ]


async def test_inspection_of_a_group_lists_native_calls_without_handing_them_over(ranks: Ranks) -> None:
    zero, one = ranks
    works = [zero.allreduce(ones()), zero.allreduce(ones(), key="step"), zero.allgather_into_tensor(ones(6), ones())]
    works.append(zero.allgather([ones(), ones()], ones()))

    def inspect_group() -> tuple[Any, ...]:
        stats = zero.stats()
        pending = [each for each in zero.recorder.dump()["entries"] if each["state"] == "pending"]
        shown = [(each["op"], each["seq"], each["key"], each["bytes"], each["function"]) for each in pending]
        assert all(":" in each["site"] and "test_declined.py" in each["site"] for each in pending)
        return stats.pending, 0 < stats.oldest < 60, shown

    from_loop, from_thread = inspect_group(), await asyncio.to_thread(inspect_group)
    function = "test_inspection_of_a_group_lists_native_calls_without_handing_them_over"
    seq = comm_of(zero).entered - 2
    assert from_loop == from_thread
    assert from_loop[:2] == (4, True)
    assert [each[:3] for each in from_loop[2]] == [
        ("ALLREDUCE", seq, None),
        ("ALLREDUCE", 1, "step"),
        ("ALLGATHER", seq + 1, None),
        ("ALLGATHER", seq + 2, None),
    ]
    assert {each[4] for each in from_loop[2]} == {function}
    assert native_calls_of(zero).count == 4
    assert all(map(is_native, works))
    await await_all(one.allreduce(ones()), one.allreduce(ones(), key="step"))
    await await_all(one.allgather_into_tensor(ones(6), ones()), one.allgather([ones(), ones()], ones()), *works)
    assert inspect_group()[0] == 0


async def test_pending_native_works_are_listed_oldest_first(ranks: Ranks, limits: Limits) -> None:
    zero, one = ranks
    limits(report_after=100.0)  # with this limit, a timeout of 50 s counts as short
    works = [zero.allreduce(ones(), timeout=timeout) for timeout in (None, 50, 51, None)]
    assert list(map(is_native, works)) == [True, False, False, True]
    assert zero.pending() == works
    assert zero.pending() == works
    assert [work.seq for work in works] == sorted(work.seq for work in works)  # type: ignore[type-var]
    await await_all(*(one.allreduce(ones()) for _ in works), *works)
    assert zero.pending() == []


async def test_native_and_pure_ranks_have_equal_counters_and_records() -> None:
    found = []
    for native in (True, False):
        async with group_of_ranks([native, native], "counted") as pgs:
            for turn in range(3):
                for call in CALLS:
                    await await_all(*[call(pg) for pg in pgs[:: 1 if turn else -1]])
            counted = [
                [
                    (row.op, row.algorithm, row.transport, row.calls, row.failures, row.nbytes)
                    for row in pg.stats().operations
                ]
                for pg in pgs
            ]
            assert all(
                sum(each for _, each in row.histogram) == row.calls for pg in pgs for row in pg.stats().operations
            )
            waited = [[(peer.rank, peer.times) for peer in pg.stats().peers] for pg in pgs]
            found.append((counted, waited, [comparable_entries(pg) for pg in pgs]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    assert found[0][2] == found[1][2]


async def test_threads_can_read_stats_during_native_calls(ranks: Ranks) -> None:
    zero, one = ranks
    stop, failures = threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                assert zero.stats().pending <= 3
                zero.recorder.dump()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(200):
            whole = ones(6)
            works = [zero.allreduce(ones()), zero.allgather_into_tensor(whole, ones())]
            await await_all(one.allreduce(ones()), one.allgather_into_tensor(ones(6), ones()), *works)
            await asyncio.sleep(0)
    finally:
        stop.set()
        thread.join()
    assert failures == []


async def test_native_call_without_elements_completes(ranks: Ranks) -> None:
    works = [pg.allreduce(ones(0)) for pg in ranks]
    await await_all(*works)
    whole = [ones(0), ones(0)]
    await await_all(*(pg.allgather_into_tensor(each, ones(0)) for pg, each in zip(ranks, whole, strict=True)))
    await check_next_call_is_native(ranks)


async def test_pure_ranks_make_no_native_calls() -> None:
    async with group_of_ranks([False, True]) as (zero, one):
        assert native_calls_of(zero) is None
        disable_accelerator(zero)
        work = zero.allreduce(ones())
        assert not is_native(work)
        await await_all(one.allreduce(ones()), work)
