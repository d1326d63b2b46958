"""The NCCL communicator of a group: creation, queries for asynchronous errors, destruction and abort."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.gpu.calls.communicator import DeviceCommunicator
from aiocoll.gpu.launcher import Launched
from aiocoll.gpu.waiter import AT_MOST
from aiocoll.runtime import Runtime

from ..internals import Limits, comm_of, dispatcher_of, group_of, nccl_end, observe_calls, observe_methods, wrap_parts
from ..ranks import run_ranks, wait_until
from .groups import Gpus, check_allreduce, check_failure, gpus, host, ones, run_with_gpus, start_unless_revoked


def communicator_of(pg: ProcessGroup) -> DeviceCommunicator:
    """Return the `DeviceCommunicator` of a group that has made a device call."""
    assert dispatcher_of(pg).device_calls is not None
    assert dispatcher_of(pg).device_calls.state.communicator is not None
    return dispatcher_of(pg).device_calls.state.communicator


def record_queries(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> list[int]:
    """Make communicators query for NCCL errors frequently; return a list with one entry per query."""
    queries: list[int] = []
    limits(device_check_interval=0.001)
    observe_calls(monkeypatch, check_device_error=lambda _: queries.append(1))
    return queries


async def test_async_error_query_never_overlaps_another_one_and_its_late_result_is_ignored(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    queries = record_queries(monkeypatch, limits)
    answer = threading.Event()
    questions: list[int] = []

    def slow_query() -> str:
        questions.append(1)
        assert answer.wait(10)
        return "too late"

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        nccl_end(pg).async_error = slow_query
        gate = gpu.gate(0)
        work = start_unless_revoked(pg, gpu)
        await wait_until(lambda: questions)
        so_far = len(queries)
        await wait_until(lambda: len(queries) > so_far + 3)
        assert len(questions) == 1
        pg.abort("enough")
        answer.set()
        await dispatcher_of(pg).device_calls.state.device.run(lambda: None)  # type: ignore[union-attr]
        await check_failure(pg, work, "enough")
        gate.open()

    await run_with_gpus(1, body)


async def test_event_loop_yields_the_gil_until_the_launcher_thread_has_enqueued_a_call(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """Check that the event loop yields less and less often, and not at all while calls only wait for a stream.

    The launcher may be in a call that waits for another rank, so the loop must not yield too often.
    """
    limits(device_check_interval=60.0)  # the check for asynchronous errors occupies the launcher thread, too
    free = threading.Event()
    checks: dict[Launched, list[tuple[float, bool]]] = defaultdict(list)
    yields: list[int] = []

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        device = dispatcher_of(pg).device_calls.state.device  # type: ignore[union-attr]
        waiting = device.run(lambda: free.wait(10))
        work = start_unless_revoked(pg, gpu)
        await wait_until(lambda: len(yields) >= 4)
        free.set()
        await waiting
        await work
        launched = max(checks, key=lambda each: len(checks[each]))
        await wait_until(lambda: checks[launched][-1][1])
        waits = [waited for waited, _ in checks[launched]]
        assert waits == [min(0.001 * 2**number, 0.016) for number in range(len(waits))]
        found = [enqueued for each in checks.values() for _, enqueued in each]
        # The launcher may enqueue the call between a check and the following yield.
        assert len(yields) <= found.count(False)
        gate = gpu.gate(0)
        works = [start_unless_revoked(pg, gpu) for _ in range(2 * AT_MOST)]
        await wait_until(lambda: not device.is_launching)
        checks.clear()
        # Skip the first check, which may count a call that was launched after the previous check.
        await wait_until(lambda: any(not enqueued for each in checks.values() for _, enqueued in each))
        yields.clear()
        checks.clear()
        await wait_until(lambda: sum(map(len, checks.values())) > 4)
        assert len(checks) == 1, "more than one of the waiting calls was checked"
        assert not yields
        gate.open()
        await asyncio.gather(*(work.join() for work in works))

    def record_check(_: DeviceCommunicator, launched: Launched, waited: float) -> None:
        checks[launched].append((waited, launched.enqueued))

    observe_calls(monkeypatch, yield_to_launcher=record_check)
    observe_methods(monkeypatch, Runtime, yield_gil=lambda _: yields.append(1))
    await run_with_gpus(1, body)


async def test_async_error_is_not_queried_before_the_communicator_exists(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    queries = record_queries(monkeypatch, limits)
    make = threading.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        work = pg.allreduce(tensor := ones(pg, gpu))
        await wait_until(lambda: len(queries) > 3)
        assert not communicator_of(pg).is_begun
        make.set()
        assert await work is tensor

    with gpus(1) as gpu:
        gpu.nccl.hooks.append(lambda call: call != "init" or make.wait(10))
        await run_ranks(1, body, gpu)


async def test_communicator_that_is_ready_only_after_its_group_has_ended_is_aborted(limits: Limits) -> None:
    limits(device_release_timeout=0.05)
    make = threading.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        calls = gpu.calls()
        await pg.allreduce(gpu.tensor(np.ones(0), 0))
        await pg.shutdown()
        make.set()
        await wait_until(lambda: calls and calls[-1] == "abort")

    with gpus(1) as gpu:
        gpu.nccl.hooks.append(lambda call: call != "init" or make.wait(10))
        await run_ranks(1, body, gpu)


async def test_failed_creation_of_a_communicator_fails_a_group_without_pending_calls() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        gpu.nccl.fail_next("init", "unhandled cuda error")
        await pg.allreduce(gpu.tensor(np.ones(0), 0))
        await check_failure(pg, None, "group .* failed on rank 0, device 0: init: unhandled cuda error")

    await run_with_gpus(1, body)


async def test_remaining_ranks_destroy_the_communicator_although_a_rank_has_left_the_group(limits: Limits) -> None:
    limits(device_departure_timeout=60)
    ends: dict[int, Any] = {}

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        ends[pg.rank()] = nccl_end(pg)
        await pg.barrier()
        if pg.rank() == 0:
            comm_of(pg).timeout = 0.05
        elif pg.rank() == 1:
            closing = asyncio.ensure_future(communicator_of(pg).close())
            await wait_until(lambda: 0 in comm_of(pg).left)
            assert not closing.done()
            await pg.send_object("all ready", 2)
            await closing
        else:
            await pg.recv_object(1)
        await pg.shutdown()

    await run_with_gpus(3, body)
    assert [(ends[rank].destroyed, ends[rank].aborted) for rank in range(3)] == [
        (False, True),
        (True, False),
        (True, False),
    ]


async def test_error_in_the_first_device_call_of_a_group_fails_the_other_pending_calls() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        works = [start_unless_revoked(pg, gpu), start_unless_revoked(pg, gpu)]
        gpu.cuda.fail_next("stream_create", "out of memory")
        for work in works:
            await check_failure(pg, work, "group .* failed on rank 0, device 0: stream_create: out of memory")

    await run_with_gpus(1, body)


async def test_cancelled_await_of_on_stream_does_not_affect_on_stream_of_another_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            tensor = ones(pg, gpu)
            gone, stays = (asyncio.ensure_future(each.on_stream()) for each in [pg.allreduce(tensor)] * 2)
            await asyncio.sleep(0)
            gone.cancel()
            await pg.send_object("called", 1)
            assert await stays is tensor
            assert gone.cancelled()
        else:
            await pg.recv_object(0)
            await pg.allreduce(ones(pg, gpu))

    await run_with_gpus(2, body)


async def test_groups_that_end_concurrently_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Let two ranks end two groups in opposite orders."""

    async def late(parted: Any, end: DeviceCommunicator) -> bool:
        is_first = group_of(end).rank == int(group_of(end).name.endswith("other"))
        return await parted(end) and (is_first or await asyncio.sleep(0.05, True))

    wrap_parts(monkeypatch, wait_for_device_peers=late)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        groups = [await pg.split_group([[0, 1]], group_name=name) for name in ("one", "other")]
        for each in groups:
            assert each is not None
            await check_allreduce(each, gpu)

    await run_with_gpus(2, body)
    assert "has not ended" not in caplog.text


async def test_communicator_is_not_aborted_during_an_nccl_call(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that an abort waits until the current NCCL call returns, without blocking the event loop."""
    limits(device_abort_timeout=0.02)
    calling, go_on = threading.Event(), threading.Event()

    def block_broadcast(call: str) -> None:
        if call == "broadcast":
            calling.set()
            assert go_on.wait(10)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        end: Any = nccl_end(pg)
        work = pg.broadcast(ones(pg, gpu), 0)
        await wait_until(calling.is_set)
        pg.abort("enough")
        await check_failure(pg, work, "enough")
        await wait_until(lambda: "or an earlier NCCL call has not returned" in caplog.text)
        assert not end.aborted
        go_on.set()
        await wait_until(lambda: end.aborted)

    with gpus(1) as gpu:
        gpu.nccl.hooks.append(block_broadcast)
        await run_ranks(1, body, gpu)


async def test_group_is_closed_only_after_its_communicator_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `shutdown` waits for the abort, since the end of the process would unload NCCL during the abort."""
    go_on = threading.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        end = nccl_end(pg)
        abort, destroyed = end.abort, gpu.cuda.calls["stream_destroy"]
        monkeypatch.setattr(end, "abort", lambda: go_on.wait(10) and abort())
        pg.abort("enough")
        shut = asyncio.ensure_future(pg.shutdown())
        await wait_until(lambda: gpu.cuda.calls["stream_destroy"] == destroyed + 2)
        await asyncio.sleep(0)
        assert not shut.done()
        go_on.set()
        await shut
        assert end.aborted

    await run_with_gpus(1, body)


@pytest.mark.parametrize("end", ["abort", "shutdown"])
async def test_communicator_ends_only_after_its_running_error_query(end: str, limits: Limits) -> None:
    """End the communicator while the launcher thread queries it for errors."""
    limits(device_check_interval=0.001)
    querying, go_on = threading.Event(), threading.Event()

    def slow_query(call: str) -> None:
        if call == "async_error":
            querying.set()
            assert go_on.wait(10)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        await gpu.shared_device(0).run(lambda: None)
        gpu.nccl.hooks.append(slow_query)
        made: Any = nccl_end(pg)
        gate = gpu.gate(0)
        work = start_unless_revoked(pg, gpu)
        await wait_until(querying.is_set)
        gate.open()
        if end == "abort":
            pg.abort("enough")
            await check_failure(pg, work, "enough")
        else:
            await work
        shut = asyncio.ensure_future(pg.shutdown())
        await asyncio.sleep(0.01)
        assert not made.aborted
        assert not made.destroyed
        go_on.set()
        await shut
        await wait_until(lambda: made.aborted or made.destroyed)

    await run_with_gpus(1, body)


@pytest.mark.parametrize("connect", [None, "1"])
async def test_blocking_first_nccl_calls_do_not_block_the_event_loop(
    connect: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also that by default, ranks connect when they create the communicator, so that no call blocks."""
    if connect is None:
        monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)
    else:
        monkeypatch.setenv("NCCL_RUNTIME_CONNECT", connect)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        for number in range(3):
            await pg.allreduce(one := ones(pg, gpu))
            await pg.broadcast(two := gpu.tensor(np.full(3, rank), rank), number)
            await pg.allreduce(ones(pg, gpu), key=f"{number}")
            assert (host(one).tolist(), host(two).tolist()) == ([3] * 3, [number] * 3)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)
    assert bool(gpu.nccl.connecting) == (connect == "1")
    assert {name.rpartition("-")[0] for name in gpu.nccl.connecting} <= {"aiocoll-launch"}
