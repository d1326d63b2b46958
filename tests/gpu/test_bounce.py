"""Staged calls during NCCL kernels: no thread locks or frees page-locked memory, which would wait for the kernels."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, ProcessGroup, ReduceOp
from aiocoll.gpu import bounce
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.bounce import Bounce
from aiocoll.gpu.device import Device

from ..fakes.arrays import FakeArray
from ..internals import Limits, dispatcher_of, nccl_end
from ..ranks import run_ranks, wait_until
from .devices import GatedCall, fake_cuda, launch_call
from .groups import Gpus, gpus, host, run_with_gpus

COUNTS = (1, 1000, 300_000)


async def occupy_device(pg: ProcessGroup, gpu: Gpus) -> Any:
    """Occupy rank 0's device by a call that waits for rank 1; return its work, or None on rank 1."""
    tensor = gpu.tensor(np.ones(3), pg.rank())
    for _ in range(3):
        await pg.allreduce(tensor)
    await pg.barrier()
    if pg.rank():
        return None
    work = pg.allreduce(tensor)
    await wait_until(lambda: nccl_end(pg).in_flight)
    return work


async def release_device(pg: ProcessGroup, gpu: Gpus, work: Any) -> None:
    """Complete the call that `occupy_device` has started, so that the device becomes free."""
    await (pg.allreduce(gpu.tensor(np.ones(3), 1)) if work is None else work)


@pytest.mark.parametrize("count", COUNTS)
async def test_staged_calls_use_pageable_memory_while_nccl_kernels_run(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce, "NBYTES", 1 << 19)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        work = await occupy_device(pg, gpu)
        values = np.arange(count) + rank
        tensor, bits = gpu.tensor(values, rank), gpu.tensor(values, rank)
        await (pg.recv(tensor, 1) if rank == 0 else pg.send(tensor, 0))
        assert (host(tensor) == np.arange(count) + 1).all()
        await (pg.send(tensor, 1) if rank == 0 else pg.recv(tensor, 0))
        reduced = pg.allreduce(bits, ReduceOp.BOR, key="bits")
        await reduced.on_stream()
        await reduced
        assert (host(bits) == (np.arange(count) | np.arange(count) + 1)).all()
        await release_device(pg, gpu, work)

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)
        assert gpu.cuda.live()["pinned"] >= bounce.NBYTES


async def test_staging_copies_in_threads_do_not_invalidate_stream_captures() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        work = await occupy_device(pg, gpu)
        if rank == 0:
            captured = gpu.stream(0)
            gpu.torch.streams[0] = 0
            gpu.cuda.capture(captured, True)
        tensor = gpu.tensor(np.full(COUNTS[1], 1 << rank), rank)
        await pg.allreduce(tensor, ReduceOp.BOR, key="bits")
        assert (host(tensor) == 3).all()
        if rank == 0:
            gpu.cuda.capture(captured, False)
        await release_device(pg, gpu, work)
        assert gpu.cuda.disturbed == []

    await run_with_gpus(2, body)


async def test_missing_page_locked_memory_is_allocated_when_the_device_is_idle(limits: Limits) -> None:
    """Check also that page-locked memory is freed only while the device is idle."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        device = gpu.shared_device(rank)
        tensor = gpu.tensor(np.full(COUNTS[1], 1 << rank), rank)
        work = await occupy_device(pg, gpu)
        before = device.staging.kept
        await pg.allreduce(tensor, ReduceOp.BOR, key="bits")
        if rank == 0:
            assert device.staging.kept == before
            await pg.send_object("nothing is locked yet", 1)
        else:
            await pg.recv_object(0)
        await release_device(pg, gpu, work)
        await wait_until(lambda: device.staging.kept > before)
        await pg.barrier()
        limits(max_free_staging_bytes=0)
        work = await occupy_device(pg, gpu)
        await pg.allreduce(tensor, ReduceOp.BOR, key="bits")
        assert device.staging.kept == 0
        if rank == 0:
            assert gpu.cuda.live()["pinned"] > 2 * bounce.NBYTES
            await pg.send_object("it is not freed yet", 1)
        else:
            await pg.recv_object(0)
        await release_device(pg, gpu, work)
        await wait_until(lambda: gpu.cuda.live()["pinned"] == 2 * bounce.NBYTES)

    await run_with_gpus(2, body)


@pytest.mark.parametrize("call", ["copy_to_host", "copy_to_device", "stream_create"])
async def test_failed_copy_of_a_staged_call_fails_the_group(call: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        calls = [await occupy_device(pg, gpu)]
        if rank == 0:
            gpu.cuda.fail_next(call, "no")
        large = gpu.tensor(np.zeros(COUNTS[2]), rank)
        sends = (call == "copy_to_device") == bool(rank)
        calls.append(pg.send(large, 1 - rank) if sends else pg.recv(large, 1 - rank))
        assert isinstance(await pg.wait_revoked(), GroupError)
        assert call in str(await pg.wait_revoked())
        await asyncio.gather(*filter(None, calls), return_exceptions=True)

    await run_with_gpus(2, body)


@pytest.mark.parametrize("failing", ["stream_wait", "event_record"])
async def test_failed_cuda_call_before_a_staging_copy_fails_the_group(failing: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()

        def refuse(call: str) -> None:
            if call == failing and gpu.cuda.current() == 0:
                raise DeviceError(call, "no", fatal=False)

        earlier = await occupy_device(pg, gpu)
        small = gpu.tensor(np.zeros(3), rank)
        if rank == 0:
            work = pg.recv(small, 1)
            await gpu.shared_device(0).run(lambda: None)  # wait until the receive has its memory
            gpu.cuda.hooks.append(refuse)
            await pg.send_object("now", 1, tag=1)
        else:
            await pg.recv_object(0, tag=1)
            work = pg.send(small, 0)
        assert failing in str(await pg.wait_revoked())
        await asyncio.gather(*filter(None, [earlier, work]), return_exceptions=True)

    await run_with_gpus(2, body)


async def test_device_is_not_idle_while_calls_run_on_an_abandoned_stream() -> None:
    with fake_cuda(1) as cuda:
        device = Device.of(cuda, 0)
        stream = device.common_stream()
        gated = GatedCall(cuda, stream)
        _, ended = launch_call(device, stream, gated)
        assert not await device.leave_common_stream(0.001)
        assert await device.run(lambda: device.page_locked(100)) is None
        assert device.staging.kept == 0
        gated.open()
        await ended
        await wait_until(lambda: device.staging.kept > 0)
        assert await device.run(lambda: device.page_locked(100)) is not None


async def test_array_larger_than_the_bounce_buffer_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce, "NBYTES", 100)
    with fake_cuda(1) as cuda:
        device = Device.of(cuda, 0)
        block = await device.run(lambda: Bounce(cuda))
        source = FakeArray(cuda, np.arange(123.0))
        target = FakeArray(cuda, np.zeros(123))
        between = np.zeros(123)
        await device.run(lambda: block.copy([(between, source.ptr)], to_host=True))
        assert (between == np.arange(123)).all()
        await device.run(lambda: block.copy([(between, target.ptr)], to_host=False))
        assert (target.numpy() == np.arange(123)).all()
        live = cuda.live()
        cuda.fail_next("copy_to_host", "no")
        with pytest.raises(DeviceError, match="no"):
            await device.run(lambda: block.copy([(between, source.ptr)], to_host=True))
        assert cuda.live() == live


async def test_device_without_nccl_allocates_no_bounce_buffer() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await asyncio.gather(*(pg.allreduce(gpu.tensor(np.ones(3), pg.rank())).join() for _ in range(9)))
        assert dispatcher_of(pg).device_calls.state.device._bounce is None  # type: ignore[union-attr]

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)
