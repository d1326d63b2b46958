"""Failures of groups with CUDA arrays: every rank raises an error with the cause, and no rank hangs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    PeerLostError,
    ProcessGroup,
    Recv,
    ReduceOp,
)
from aiocoll.gpu.api import DeviceError

from ..internals import Limits, comm_of, dispatcher_of, nccl_end
from ..ranks import hub_of, run_ranks, wait_until
from .groups import (
    WAYS,
    Gpus,
    check_allreduce,
    check_failure,
    end_group,
    gpus,
    ones,
    run_with_gpus,
    start_allreduce,
    start_list,
    start_unless_revoked,
)

both = pytest.mark.parametrize("way", WAYS)


def start_list_of_one(pg: ProcessGroup, gpu: Gpus, **more: Any) -> Any:
    """Start a list call with one allreduce, which is launched like a single call and not as a block."""
    return pg.allreduce_coalesced([gpu.tensor(np.ones(2, np.int16), pg.rank())], **more)


calls = pytest.mark.parametrize("call", [start_allreduce, start_list])


@both
@calls
async def test_timeout_error_of_a_device_call_names_a_rank_that_does_not_call(way: str, call: Any) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        work = start_unless_revoked(pg, gpu, call, timeout=0.1) if pg.rank() != 2 else None
        match = "(ALLREDUCE|COALESCED) .* did not complete within 0.1 s.*it waits for .*rank 2"
        await check_failure(pg, work, match, CollectiveTimeoutError)

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@both
@pytest.mark.parametrize("call", [start_allreduce, start_list_of_one, start_list])
async def test_timeout_error_of_a_device_call_names_a_stuck_device(way: str, call: Any) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        gate = gpu.gate(pg.rank()) if pg.rank() == 1 else None
        work = start_unless_revoked(pg, gpu, call, timeout=0.1 if pg.rank() == 1 else 10)
        match = (
            r"(ALLREDUCE|COALESCED) \(sequence \d\) .* rank 1, which called (ALLREDUCE|COALESCED).*"
            "all ranks have made this call, but device 1 has not finished it"
        )
        await check_failure(pg, work, match, CollectiveTimeoutError)
        if gate is not None:
            gate.open()

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
@calls
async def test_error_names_a_lost_rank_during_device_calls(way: str, call: Any) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        if pg.rank() == 0:
            await pg.recv_object(1)
            gate = gpu.gate(0)
            work = call(pg, gpu)
            await asyncio.sleep(0)
            hub_of(pg).cut(0, 1)
            await check_failure(pg, work, "rank . .* is lost", PeerLostError)
            gate.open()
        else:
            await pg.send_object("ready", 0)
            await check_failure(pg, start_unless_revoked(pg, gpu, call), "rank . .* is lost", PeerLostError)

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
@calls
@pytest.mark.parametrize("end", ["abort", "shutdown"])
async def test_end_of_a_group_fails_its_pending_device_calls(way: str, call: Any, end: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        gate = gpu.gate(pg.rank())
        works = [call(pg, gpu) for _ in range(3)]
        ordered = asyncio.ensure_future(works[2].on_stream())
        await pg.barrier()
        await end_group(pg, works, end, gate)
        await asyncio.wait([ordered])
        ordered.exception()
        with pytest.raises(GroupClosedError):
            call(pg, gpu)

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("call", ["copy_to_host", "copy_to_device", "pinned"])
async def test_error_of_a_failed_staging_copy_names_rank_and_device(call: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 1:
            gpu.cuda.fail_next(call)
        await check_failure(
            pg, start_unless_revoked(pg, gpu), f"ALLREDUCE .* failed on rank ., device .: {call}: invalid"
        )

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


@both
@pytest.mark.parametrize("how", ["call", "batch", "block"])
async def test_cuda_error_in_a_device_message_fails_the_group(how: str, way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        await pg.barrier()
        works = []
        if pg.rank() == 1:
            gpu.cuda.fail_next("event_record")
            with contextlib.suppress(GroupError):
                if how == "call":
                    works.append(pg.send(ones(pg, gpu), 0))
                elif how == "batch":
                    works.append(pg.batch([Recv(ones(pg, gpu), 0, tag) for tag in range(2)]))
                else:
                    async with pg.coalescing():
                        works.extend([pg.recv(ones(pg, gpu), 0), pg.send(ones(pg, gpu), 0)])
        await check_failure(pg, None, "(RECV|SEND) .*failed on rank 1, device 1: event_record: invalid")
        assert not comm_of(pg).in_flight.pending
        for work in works:
            with pytest.raises(GroupError):
                await work

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("call", ["collective", "message"])
async def test_staging_memory_of_a_failed_group_is_reused_only_when_the_device_is_done(call: str) -> None:
    """Check the memory of a failed group to which a pending copy still writes."""

    def start_call(pg: ProcessGroup, gpu: Gpus) -> Any:
        tensor = gpu.tensor(np.ones(1000), pg.rank())
        return pg.allreduce(tensor) if call == "collective" else pg.send(tensor, 1)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        is_message = call == "message"
        await (pg.recv(gpu.tensor(np.ones(1000), 1), 0) if pg.rank() and is_message else start_call(pg, gpu))
        await pg.barrier()
        if pg.rank():
            if not is_message:
                await asyncio.wait([start_call(pg, gpu).get_future()])
            await pg.wait_revoked()
            return
        staging = gpu.shared_device(0).staging
        await wait_until(lambda: staging.kept > 0)
        kept, gate = staging.kept, gpu.gate(0)
        work = start_call(pg, gpu)
        await wait_until(lambda: staging.kept < kept)
        pg.abort("enough")
        with pytest.raises(GroupError, match="enough"):
            await work
        assert staging.kept < kept
        gate.open()
        await wait_until(lambda: staging.kept == kept)

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_message_on_a_stream_captured_within_its_block_is_refused() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await check_allreduce(pg, gpu)
        stream, into = gpu.stream(rank), gpu.tensor(np.zeros(3), rank)
        with contextlib.suppress(RuntimeError):
            async with pg.coalescing():
                works = [pg.recv(ones(pg, gpu), 1 - rank, tag=1)]
                gpu.torch.streams.pop(rank)
                works += [pg.recv(into, 1 - rank), pg.send(ones(pg, gpu), 1 - rank)]
                gpu.cuda.capture(stream, True, rank)
        gpu.cuda.capture(stream, False, rank)
        with pytest.raises(RuntimeError, match="is being captured into a graph"):
            await works[0]
        await works[1]
        await works[2]
        assert into.values.tolist() == [1] * 3

    await run_with_gpus(2, body)


@both
@pytest.mark.parametrize("key", [None, "key"])
async def test_collective_on_a_stream_captured_within_its_block_fails_the_group(key: str | None, way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await check_allreduce(pg, gpu)
        await pg.barrier()
        stream, work = gpu.stream(rank), None
        with contextlib.suppress(GroupError):
            async with pg.coalescing():
                work = pg.allreduce(ones(pg, gpu), key=key)
                gpu.cuda.capture(stream, rank == 1, rank)
        gpu.cuda.capture(stream, False, rank)
        await check_failure(pg, work, "failed on rank 1, device 1: .* is being captured into a graph")
        assert not comm_of(pg).in_flight.pending

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_error_of_a_device_call_names_the_failed_device(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        if pg.rank() == 1:
            await pg.recv_object(0)
            gpu.cuda.fail("unspecified launch failure", 1)
        else:
            await pg.send_object("ready", 1)
        await check_failure(
            pg, start_unless_revoked(pg, gpu), "ALLREDUCE .* failed on rank 1, device 1: .*launch failure"
        )

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


# -- NCCL


@pytest.mark.parametrize(
    ("failing", "call"),
    [
        ("all_reduce", start_allreduce),
        ("init", start_allreduce),
        ("all_reduce", start_list),
        ("group_start", start_list),
        ("group_end", start_list),
    ],
)
async def test_refused_nccl_call_fails_the_group(failing: str, call: Any, limits: Limits) -> None:
    limits(device_release_timeout=0.05)  # seconds for which other ranks wait for a rank that failed to start

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 1:
            gpu.nccl.fail_next(failing, "unhandled cuda error")
        await check_failure(
            pg, start_unless_revoked(pg, gpu, call), f"failed on rank ., device .: {failing}: unhandled cuda error"
        )

    await run_with_gpus(2, body)


async def test_failed_call_in_an_nccl_call_group_fails_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            gpu.nccl.fail_next("send", "invalid usage")
        outputs, inputs = ([gpu.tensor(np.ones(2), pg.rank()) for _ in range(2)] for _ in range(2))
        await check_failure(
            pg, pg.alltoall(outputs, inputs), "ALLTOALL .* failed on rank ., device .: send: invalid usage"
        )

    await run_with_gpus(2, body)


async def test_asynchronous_nccl_error_fails_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        assert dispatcher_of(pg).device_calls is not None
        assert dispatcher_of(pg).device_calls.state.communicator is not None
        if pg.rank() == 0:
            nccl_end(pg).fail("remote process exited")
        await pg.barrier()
        await check_failure(
            pg, start_unless_revoked(pg, gpu), "failed on rank 0, device 0: NCCL: remote process exited"
        )

    await run_with_gpus(2, body)


@pytest.mark.parametrize(
    ("hosts", "chosen", "match"),
    [
        ((0, 0, 0), None, "restart the process$"),
        (
            (0, 1, 1),
            None,
            r"on 2 hosts.* set NCCL_SOCKET_IFNAME \(not set on this rank\) to an interface that does, on all ranks",
        ),
        (
            (0, 1, 2),
            "docker0",
            r"on 3 hosts.* set NCCL_SOCKET_IFNAME \('docker0' on this rank\) to an interface that does",
        ),
    ],
)
async def test_timeout_error_reports_a_communicator_that_nccl_never_creates(
    hosts: tuple[int, ...], chosen: str | None, match: str, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    limits(device_release_timeout=0.05)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        comm_of(pg).hosts = hosts
        gpu.nccl.init_hangs = True
        work = pg.allreduce(ones(pg, gpu), timeout=0.2)
        await check_failure(
            pg, work, f"NCCL has not created the communicator on device .: .*{match}", CollectiveTimeoutError
        )

    await run_with_gpus(3, body)


async def test_hanging_communicator_abort_is_logged(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    limits(device_release_timeout=0.1, device_abort_timeout=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        gpu.nccl.abort_hangs = True
        gate = gpu.gate(pg.rank())
        work = pg.allreduce(ones(pg, gpu))
        await work.on_stream()
        await pg.barrier()
        if pg.rank() == 0:
            pg.abort("enough")
        await check_failure(pg, work, "enough")
        await pg.shutdown()
        gate.open()

    await run_with_gpus(2, body)
    assert "NCCL did not abort the communicator within 0.05 s" in caplog.text


async def test_failed_communicator_abort_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        await pg.barrier()
        if pg.rank() == 0:
            gpu.nccl.fail_next("abort", "no")
        pg.abort("enough")
        await pg.shutdown()

    with gpus(1) as gpu:
        await run_ranks(1, body, gpu)
        await asyncio.sleep(0)
    assert "rank 0: the NCCL communicator was not aborted: abort: no" in caplog.text


async def test_shutdown_destroys_the_communicator() -> None:
    ends: list[Any] = []

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        ends.append(nccl_end(pg))
        await pg.shutdown()

    await run_with_gpus(3, body)
    assert [(end.destroyed, end.aborted) for end in ends] == [(True, False)] * 3


async def test_rank_that_closes_alone_aborts_the_communicator(limits: Limits) -> None:
    limits(device_departure_timeout=0.05)
    ends: list[Any] = []

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        other = await pg.split_group([0, 1])
        assert other is not None
        await check_allreduce(other, gpu)
        ends.append(nccl_end(other))
        if pg.rank() == 0:
            await other.shutdown()
        await pg.barrier()
        await other.shutdown()

    await run_with_gpus(2, body)
    assert [end.destroyed or end.aborted for end in ends] == [True] * 2


async def test_bitwise_ops_are_staged_in_groups_with_nccl() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        before = gpu.cuda.calls["copy_to_host"]
        await pg.barrier()
        await pg.allreduce(gpu.tensor(np.ones(2, int), pg.rank()), ReduceOp.BXOR)
        await pg.barrier()
        assert gpu.cuda.calls["copy_to_host"] == before + pg.size()

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)
        assert gpu.cuda.calls["copy_to_host"] == 2


async def test_last_rank_detects_at_shutdown_that_the_other_ranks_have_left(limits: Limits) -> None:
    limits(device_departure_timeout=60)
    ends: list[Any] = []

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        communicator = dispatcher_of(pg).device_calls.state.communicator  # type: ignore[union-attr]
        ends.append(nccl_end(pg))
        await pg.barrier()
        if pg.rank() == 0:
            communicator.abort()  # type: ignore[union-attr]
        else:
            await wait_until(lambda: 0 in comm_of(pg).left)
        await pg.shutdown()
        assert comm_of(pg).cause is None

    await run_with_gpus(2, body)
    assert [end.aborted for end in ends] == [True] * 2


@both
async def test_on_stream_of_a_device_call_that_never_starts_raises_an_error(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 1:
            await pg.recv_object(0)
            pg.abort("enough")
            return
        ordered = asyncio.ensure_future(pg.allreduce(ones(pg, gpu)).on_stream())
        await pg.send_object("called", 1)
        with pytest.raises(GroupError, match="enough"):
            await ordered

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_on_stream_raises_the_failure_of_its_device_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        gpu.nccl.fail_next("all_reduce", "no memory")
        with pytest.raises(GroupError, match=r"ALLREDUCE .* failed on rank 0, device 0: all_reduce: no memory"):
            await pg.allreduce(ones(pg, gpu)).on_stream()

    await run_with_gpus(1, body)


async def test_failed_async_error_query_fails_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        end: Any = nccl_end(pg)

        def fail() -> None:
            raise DeviceError("async_error", "no answer")

        end.async_error = fail
        gate = gpu.gate(0)
        await check_failure(pg, start_unless_revoked(pg, gpu), "failed on rank 0, device 0: async_error: no answer")
        gate.open()

    await run_with_gpus(1, body)


async def test_failed_stream_creation_fails_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        work = pg.allreduce(ones(pg, gpu))
        gpu.cuda.fail_next("stream_create", "out of memory")
        await check_failure(pg, work, "group .* failed on rank 0, device 0: stream_create: out of memory")

    await run_with_gpus(1, body)


async def test_call_description_above_the_size_limit_fails_the_group(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(max_object_bytes=8)
    monkeypatch.setenv("AIOCOLL_VERIFY", "before")

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_failure(
            pg, start_unless_revoked(pg, gpu), "ALLREDUCE was not compared: rank 1 sent an object of .* bytes"
        )

    await run_with_gpus(2, body)


@pytest.mark.parametrize("call", ["bus_id", "capability", "stream_create"])
async def test_refused_first_device_call_leaves_no_objects(call: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        gpu.cuda.fail_next(call, "busy")
        with pytest.raises(DeviceError, match=f"{call}: busy"):
            pg.allreduce(ones(pg, gpu))
        assert gpu.cuda.live()["streams"] == 0
        assert not comm_of(pg).on_revoked + comm_of(pg).on_departed
        await check_allreduce(pg, gpu)

    await run_with_gpus(1, body)
