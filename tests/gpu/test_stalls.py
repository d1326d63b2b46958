"""Blocked CUDA queries while a lost rank keeps a kernel running: the event loop still runs and raises the error."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from aiocoll import GroupError, PeerLostError, ProcessGroup

from ..ranks import hub_of, run_ranks, wait_until
from .groups import Gpus, check_allreduce, check_failure, gpus, ones


async def test_lost_rank_is_reported_while_cuda_queries_block() -> None:
    """Let the kernel of the surviving rank wait for the lost rank until an abort ends the kernel."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        await pg.barrier()
        gpu.cuda.stalls = True
        gate = gpu.gate(1) if pg.rank() == 1 else None  # keeps rank 1's kernel from starting
        work = pg.allreduce(ones(pg, gpu))
        if gate is None:
            await wait_until(lambda: len(gpu.cuda.stalled) == 2)
            hub_of(pg).cut(0, 1)
            await check_failure(pg, work, "rank 1", PeerLostError)
        else:
            await check_failure(pg, work, "rank 0", PeerLostError)
            gate.open()

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)
    assert {name.rpartition("-")[0] for name in gpu.cuda.stalled} == {"aiocoll-launch"}
    assert not gpu.cuda.overdue


async def test_awaiting_on_stream_raises_the_abort_error_while_the_launcher_thread_is_stuck() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        gpu.cuda.stalls = True
        gate = gpu.gate(0)
        works = [pg.allreduce(ones(pg, gpu))]
        await wait_until(lambda: gpu.cuda.stalled)
        works.append(pg.allreduce(ones(pg, gpu)))  # the stuck launcher never launches this call
        ordered = [asyncio.ensure_future(work.on_stream()) for work in works]
        assert await ordered[0] is not None
        pg.abort("enough")
        with pytest.raises(GroupError, match="enough"):
            async with asyncio.timeout(20):
                await ordered[1]
        gate.open()

    with gpus(1) as gpu:
        await run_ranks(1, body, gpu)
    assert threading.main_thread().name not in gpu.cuda.stalled


async def test_event_loop_never_makes_cuda_queries() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        gpu.cuda.stalls = True
        for number in range(20):
            tensor = gpu.tensor(np.full(1000, number), pg.rank())
            await pg.allreduce(tensor)
            await pg.allreduce(tensor, key=str(number)).on_stream()

    with gpus(2) as gpu:
        gpu.cuda.latency = 1e-3
        await run_ranks(2, body, gpu)
    assert threading.main_thread().name not in gpu.cuda.stalled
