"""Groups on fake devices through each adapter: CuPy, or ctypes with libcuda and libnccl."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, ProcessGroup, ReduceOp
from aiocoll.gpu.provider import runtime

from ..ranks import run_ranks
from .device_kinds import ADAPTER, ADAPTERS
from .groups import WAYS, Gpus, check_block_of_every_kind, gpus, host, run_with_gpus

adapters = pytest.mark.parametrize("adapter", ADAPTERS)


@adapters
@pytest.mark.parametrize("way", WAYS)
async def test_every_kind_of_call_gives_correct_results_through_each_adapter(
    adapter: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADAPTER, adapter)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        assert type(runtime()[0]).__module__ != "tests.fakes.cuda"
        for _ in range(3):
            await check_block_of_every_kind(pg, gpu)

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@adapters
async def test_abort_through_each_adapter_fails_device_calls_in_flight(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADAPTER, adapter)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        tensor = gpu.tensor(np.ones(3), rank)
        for _ in range(3):
            await pg.allreduce(tensor)
        works: list[Any] = [pg.allreduce(tensor) for _ in range(5)] if rank else []
        await asyncio.sleep(0.01)
        if rank == 0:
            pg.abort("enough")
        assert isinstance(await pg.wait_revoked(), GroupError)
        for work in works:
            with pytest.raises(GroupError, match="enough"):
                await work

    await run_with_gpus(2, body)


@adapters
async def test_refused_nccl_call_raises_an_error_through_each_adapter(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADAPTER, adapter)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.ones(3), 0)
        await pg.allreduce(tensor, ReduceOp.MAX)
        gpu.nccl.fail_next("all_reduce")
        with pytest.raises(GroupError, match="ncclAllReduce"):
            await pg.allreduce(tensor)
        assert host(tensor).tolist() == [1.0] * 3

    await run_with_gpus(1, body)
