"""Nonblocking NCCL communicators (`NCCL_COMM_BLOCKING=0`): all ranks refuse CUDA arrays, and the group continues."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import BackendUnavailableError, GroupOptions, ProcessGroup, ReduceOp, Work, testing
from aiocoll.gpu.calls import cards

from ..internals import set_nccl_only
from ..ranks import run_ranks
from .groups import WAYS, Gpus, check_allreduce, gpus, host, run_with_gpus

both = pytest.mark.parametrize("way", WAYS)
SETTING = "NCCL_COMM_BLOCKING"


async def refusal_of(work: Work[Any]) -> str:
    """Await a work that must be refused; return the error text."""
    with pytest.raises(BackendUnavailableError) as caught:
        await work
    return str(caught.value)


async def first_call(pg: ProcessGroup, tensor: Any, setting: tuple[int, ...]) -> str:
    """Make the first call of a group, with `NCCL_COMM_BLOCKING=0` on the given ranks; return the error text."""
    with pytest.MonkeyPatch.context() as patch:  # each rank reads the variable when it makes the call
        if pg.rank() in setting:
            patch.setenv(SETTING, "0")
        work = pg.allreduce(tensor)
    return await refusal_of(work)


@both
@pytest.mark.parametrize(
    ("world_size", "setting", "named"),
    [(1, (0,), "rank 0 has"), (2, (1,), "rank 1 has"), (3, (0,), "rank 0 has"), (3, (0, 2), "ranks 0, 2 have")],
)
async def test_all_ranks_refuse_nonblocking_nccl_communicators(
    way: str, world_size: int, setting: tuple[int, ...], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiocoll")

    async def body(pg: ProcessGroup, gpu: Gpus) -> str:
        rank = pg.rank()
        tensors = [gpu.tensor(np.full(3, rank), rank) for _ in range(2)]
        text = await first_call(pg, tensors[0], setting)
        # The group also refuses staged calls and blocks; only a new group can use CUDA arrays.
        assert await refusal_of(pg.allreduce(tensors[0], ReduceOp.BXOR, key="key")) == text
        assert await refusal_of(pg.allreduce_coalesced(tensors)) == text
        assert [host(each).tolist() for each in tensors] == [[rank] * 3] * 2
        assert await pg.allreduce(1) == world_size
        other = await pg.split_group(range(world_size))
        assert other is not None
        await check_allreduce(other, gpu)
        return text

    with gpus(world_size, way) as gpu:
        texts = await run_ranks(world_size, body, gpu)
        assert gpu.cuda.calls["copy_to_host"] == (0 if way == "nccl" else world_size)
    assert len(set(texts)) == 1
    assert f" cannot use CUDA arrays: {named} {SETTING}=0, with which NCCL's calls return" in texts[0]
    assert texts[0].endswith("; unset it and make a new group")
    assert f"CUDA arrays are refused: {named} {SETTING}=0" in caplog.text


@pytest.mark.parametrize("backends", [{"cpu": "aio", "cuda": "aio"}, {"cpu": "aio", "cuda": "nccl"}])
async def test_groups_of_any_backend_refuse_nonblocking_nccl_communicators(backends: dict[str, str]) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        set_nccl_only(pg, backends.get("cuda") == "nccl")
        assert "cannot use CUDA arrays: rank 1 has" in await first_call(pg, gpu.tensor(np.ones(2), pg.rank()), (1,))

    await run_with_gpus(2, body)


async def test_groups_that_compare_calls_refuse_nonblocking_nccl_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "0")

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        assert "ranks 0, 1 have" in await refusal_of(pg.allreduce(gpu.tensor(np.ones(2), pg.rank())))
        assert await pg.allreduce(1) == 2

    with gpus(2) as gpu:
        await testing.run_ranks(2, body, gpu, options=GroupOptions(debug="detail"))


async def test_empty_call_with_nonblocking_nccl_communicators_is_refused() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        assert "rank 0 has" in await first_call(pg, gpu.tensor(np.ones(0), pg.rank()), (0,))

    await run_with_gpus(2, body)


async def test_device_messages_work_with_nonblocking_nccl_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "0")

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        for _ in range(2):  # call before and after the first refused call
            for count in (3, 100_000):
                out, into = gpu.tensor(np.full(count, rank), rank), gpu.tensor(np.zeros(count, int), rank)
                await asyncio.gather(pg.send(out, 1 - rank).join(), pg.recv(into, 1 - rank).join())
                assert set(host(into)) == {1 - rank}
            assert "ranks 0, 1 have" in await refusal_of(pg.allreduce(out))

    await run_with_gpus(2, body)


@pytest.mark.parametrize(
    ("value", "unfinished"), [(None, False), ("", False), ("1", False), ("0", True), (" 0 ", True)]
)
def test_setting_for_nonblocking_nccl_communicators_is_recognized(
    value: str | None, unfinished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    if value is not None:
        monkeypatch.setenv(SETTING, value)
    with gpus(1) as gpu:
        assert cards.card(gpu.cuda, gpu.nccl, 0, "", True)["unfinished"] is unfinished


def test_error_names_only_the_first_of_many_ranks_with_nonblocking_communicators() -> None:
    card = {"library": 22809, "why": "", "bus": "a", "unfinished": True}
    found = cards.decide([card] * 100, [0] * 100)
    assert found.refused
    assert found.why.startswith(f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more have {SETTING}=0, with")
