"""Calls on CUDA arrays: NCCL or staging, matching of calls, streams, memory lifetime, and blocks."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    BackendUnavailableError,
    CollectiveMismatchError,
    GroupOptions,
    ProcessGroup,
    ReduceOp,
    new_group,
    testing,
)
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.calls import cards, native
from aiocoll.gpu.calls.agreed import Agreed
from aiocoll.group.dispatch.call_cache import PLANS

from ..fakes.arrays import FakeArray
from ..internals import Limits, comm_of, dispatcher_of, plans_of, set_nccl_only
from ..ranks import run_ranks, wait_until
from ..reductions import numpy_dtype
from .groups import WAYS, Gpus, check_allreduce, gpus, host, run_with_gpus
from .stub_cupy import unload_cupy_api

both = pytest.mark.parametrize("way", WAYS)


# -- without a GPU


async def test_error_without_gpu_support_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    unload_cupy_api()

    class Foreign:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (2,), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3,
        }  # fmt: skip

    async def body(pg: ProcessGroup) -> None:
        for call in (
            lambda: pg.allreduce(Foreign()),
            lambda: pg.broadcast(Foreign(), 0),
            lambda: pg.send(Foreign(), 1 - pg.rank()),
            lambda: pg.recv(Foreign(), 1 - pg.rank()),
        ):
            with pytest.raises(BackendUnavailableError, match=r"CUDA arrays need CuPy: pip install aiocoll\[cuda1"):
                call()
        assert await pg.allreduce(1) == 2

    await run_ranks(2, body)


async def test_dry_run_needs_no_device() -> None:
    with gpus(1) as gpu:
        pg = await new_group("fake", rank=0, world_size=3)
        tensor = gpu.tensor(np.ones(3), 0)
        assert await pg.allreduce(tensor) is tensor
        assert await pg.send(tensor, 1) is tensor
        assert await pg.recv(tensor, 1) is tensor
        assert gpu.cuda.calls["event_create"] == 0
        await pg.shutdown()


# -- NCCL or staging


async def first_decision(pg: ProcessGroup, gpu: Gpus, device: int | None = None) -> cards.Decision:
    device = pg.rank() if device is None else device
    await pg.allreduce(gpu.tensor(np.ones(3), device))
    assert dispatcher_of(pg).device_calls is not None
    assert dispatcher_of(pg).device_calls.state.decision is not None
    return dispatcher_of(pg).device_calls.state.decision


async def test_group_uses_nccl_if_each_rank_has_a_separate_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiocoll")
    with gpus(2) as gpu:
        first, second = await run_ranks(2, first_decision, gpu)
    assert first == second
    assert first.native
    assert "rank 1: CUDA arrays go by NCCL: all ranks have NCCL 2.28.9 and a device each" in caplog.text


async def test_device_arrays_are_staged_if_nccl_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aiocoll")
    with gpus(2, "staged") as gpu:
        found = await run_ranks(2, first_decision, gpu)
    assert found == [cards.Decision(False, "rank 0: NCCL was not provided", b"")] * 2
    assert "rank 0: CUDA arrays go through the host: rank 0: NCCL was not provided" in caplog.text


async def test_device_arrays_of_ranks_on_one_device_are_staged() -> None:
    with gpus(1) as gpu:
        found = await run_ranks(2, first_decision, gpu, 0)
    assert [each.native for each in found] == [False] * 2
    assert found[0].why == "ranks 0 and 1 use the same device, 00000000:00:00.0, which NCCL refuses"


def test_choice_between_nccl_and_staging_depends_on_versions_and_hosts() -> None:
    def one(version: int = 22809, bus: str = "a") -> cards.Card:
        why = "" if version else "gone"
        return {"library": version, "why": why, "bus": bus, "unfinished": False, "float8": True, "ahead": True}

    assert cards.decide([one(), one()], [0, 1])[:2] == (True, "all ranks have NCCL 2.28.9 and a device each")
    assert cards.decide([one(), one(23004)], [0, 1])[:2] == (False, "rank 0 has NCCL 2.28.9, rank 1 has 2.30.4")
    assert cards.decide([one(), one(0)], [0, 1])[:2] == (False, "rank 1: gone")
    assert cards.decide([one(), one(bus="b"), one()], [0, 0, 0]).native is False


async def test_group_that_requires_nccl_raises_an_error_if_nccl_is_unavailable() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        set_nccl_only(pg, True)
        with pytest.raises(BackendUnavailableError, match=r"group .* must use NCCL, but rank 0: NCCL was not provided"):
            await pg.allreduce(gpu.tensor(np.ones(3), pg.rank()))
        assert await pg.allreduce(1) == 2

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_failed_creation_of_a_unique_id_makes_the_group_stage_arrays() -> None:
    with gpus(2) as gpu:
        gpu.nccl.fail_next("unique_id", "no network")
        found = await run_ranks(2, first_decision, gpu)
    assert [each.native for each in found] == [False] * 2
    assert "rank 0: unique_id: no network" in found[0].why


async def test_group_refuses_arrays_on_another_device() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        with pytest.raises(ValueError, match=r"works on CUDA device 0, where .* these are on device 1"):
            pg.allreduce(gpu.tensor(np.ones(3), 1))
        with pytest.raises(TypeError, match="on one device"):
            pg.alltoall([gpu.tensor(np.ones(1), 1)], [gpu.tensor(np.ones(1), 0)])
        await check_allreduce(pg, gpu)

    with gpus(2) as gpu:
        await run_ranks(1, body, gpu)


# -- agreement


@both
async def test_keyed_device_calls_match_in_any_order(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        for round in range(5):
            keys = [f"{(each + pg.rank() * round) % 4}" for each in range(4)]
            works = {}
            for key in keys:
                works[key] = pg.allreduce(gpu.tensor(np.full(4, int(key) + pg.rank()), pg.rank()), key=key)
            for key, work in works.items():
                assert host(await work).tolist() == [3 * int(key) + 3] * 4

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@both
async def test_device_call_mismatch_is_raised_on_all_ranks_and_the_group_continues(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOCOLL_VERIFY", "before")

    async def body(pg: ProcessGroup, gpu: Gpus) -> str:
        for _ in range(2):  # test before and after the group has chosen NCCL or staging
            tensor = gpu.tensor(np.ones(3 + pg.rank()), pg.rank())
            with pytest.raises(CollectiveMismatchError) as caught:
                await pg.allreduce(tensor)
            assert (host(tensor) == 1).all()
            await check_allreduce(pg, gpu)
        return str(caught.value)

    with gpus(3, way) as gpu:
        texts = await run_ranks(3, body, gpu)
    assert len(set(texts)) == 1
    assert "Collectives differ in the following: counts, shape" in texts[0]
    assert "ALLREDUCE(shape=[5], dtype=float64, device=cuda" in texts[0]
    assert "debug" not in texts[0]


@both
async def test_host_array_on_one_rank_and_device_array_on_another_are_reported_as_a_mismatch(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> str:
        work = pg.allreduce(gpu.tensor(np.ones(3), 1)) if pg.rank() else pg.broadcast(np.ones(300_000), 0)
        error = await pg.wait_revoked()
        assert isinstance(error, CollectiveMismatchError)
        assert isinstance(work.exception(), CollectiveMismatchError)
        return str(error)

    with gpus(2, way) as gpu:
        for text in await run_ranks(2, body, gpu):
            assert "device=cpu" in text
            assert "device=cuda" in text


@both
async def test_several_groups_can_share_a_device(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        other = await pg.split_group([0, 1, 2])
        half = await pg.split_group([pg.rank()] if pg.rank() == 2 else [0, 1])
        assert other is not None
        assert half is not None
        works = [group.allreduce(gpu.tensor(np.ones(3), pg.rank())) for group in (pg, other, half, other, pg)]
        for work, group in zip(works, (pg, other, half, other, pg), strict=True):
            assert host(await work).tolist() == [group.size()] * 3
        await half.shutdown()
        await check_allreduce(other, gpu)

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@both
async def test_groups_over_unix_sockets_reduce_device_arrays(way: str) -> None:
    with gpus(3, way) as gpu:
        await run_ranks(3, check_allreduce, gpu, transport="unix")


# -- streams


@both
async def test_call_runs_after_earlier_work_on_the_callers_stream(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        stream = gpu.stream(pg.rank())
        tensor = gpu.tensor(np.zeros(3), pg.rank())
        gate = gpu.gate(pg.rank())
        gpu.cuda.kernel(stream, lambda: tensor.values.fill(1), pg.rank())
        work = pg.allreduce(tensor)
        gpu.cuda.kernel(stream, lambda: None, pg.rank())
        await asyncio.sleep(0)
        assert not work.done()
        gate.open()
        assert host(await work).tolist() == [2] * 3

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_work_on_a_stream_after_on_stream_sees_the_result_of_the_call(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        stream = gpu.stream(rank)
        tensor = gpu.tensor(np.ones(3), rank)
        await check_allreduce(pg, gpu)
        gpu.cuda.latency = 0.01
        seen: list[Any] = []
        work = pg.allreduce(tensor)
        assert await work.on_stream() is tensor
        gpu.cuda.kernel(stream, lambda: seen.append(tensor.values.copy()), rank)
        await work
        gpu.cuda.stream_synchronize(stream, rank)
        assert seen[0].tolist() == [2] * 3
        assert await work.on_stream(stream) is tensor

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_on_stream_of_an_nccl_call_returns_before_the_data_is_reduced() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        stream = gpu.stream(rank)
        await check_allreduce(pg, gpu)
        gate = gpu.gate(rank)
        tensor = gpu.tensor(np.ones(3), rank)
        work = pg.allreduce(tensor)
        await work.on_stream()
        assert not work.done()
        seen: list[Any] = []
        gpu.cuda.kernel(stream, lambda: seen.append(tensor.values.copy()), rank)
        gate.open()
        await work
        gpu.cuda.stream_synchronize(stream, rank)
        assert seen[0].tolist() == [2] * 3

    await run_with_gpus(2, body)


@pytest.mark.ranks(2)
async def test_on_stream_of_a_host_call_awaits_the_call(pg: ProcessGroup) -> None:
    assert await pg.allreduce(1).on_stream() == 2


@both
async def test_on_stream_accepts_streams_of_any_library(way: str) -> None:
    class Stream:
        def __init__(self, name: str, value: Any) -> None:
            setattr(self, name, value)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        address = gpu.stream(0)
        for stream in (address, Stream("cuda_stream", address), Stream("ptr", address)):
            await pg.allreduce(gpu.tensor(np.ones(3), 0)).on_stream(stream)
        work = pg.allreduce(gpu.tensor(np.ones(3), 0))
        for wrong in ("a", 1.0, True, Stream("ptr", None)):
            with pytest.raises(TypeError, match="stream must be a CUDA stream or the address of a CUDA stream"):
                await work.on_stream(wrong)
        await work

    with gpus(1, way) as gpu:
        await run_ranks(1, body, gpu)


@both
async def test_call_on_a_captured_stream_is_refused(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        stream = gpu.stream(0)
        gpu.cuda.capture(stream, True, 0)
        with pytest.raises(RuntimeError, match="being captured into a graph"):
            pg.allreduce(gpu.tensor(np.ones(3), 0))
        assert gpu.cuda.live()["streams"] == 1, "the refused call created a stream"
        gpu.cuda.capture(stream, False, 0)
        await check_allreduce(pg, gpu)

    with gpus(1, way) as gpu:
        await run_ranks(1, body, gpu)


# -- memory


@both
async def test_device_arrays_live_until_the_device_is_done(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.ones(3), pg.rank())
        memory, tensor_gone = weakref.ref(tensor.around.base), weakref.ref(tensor)
        gate = gpu.gate(pg.rank())
        work = pg.allreduce(tensor)
        del tensor
        waiting = asyncio.ensure_future(work.join())
        await asyncio.sleep(0)
        waiting.cancel()
        gc.collect()
        assert memory() is not None
        gate.open()
        await work
        del work, waiting
        await asyncio.sleep(0)
        gc.collect()
        assert tensor_gone() is None
        assert memory() is None

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_device_arrays_are_freed_without_the_garbage_collector(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        for size in (1, 1, 1, 0):
            tensor = gpu.tensor(np.ones(size), pg.rank())
            gone = weakref.ref(tensor)
            await pg.allreduce(tensor)
            del tensor
            await wait_until(lambda gone=gone: gone() is None)

    gc.disable()
    try:
        with gpus(2, way) as gpu:
            await run_ranks(2, body, gpu)
    finally:
        gc.enable()


@both
async def test_many_device_calls_leave_no_objects(way: str) -> None:
    async def call(pg: ProcessGroup, gpu: Gpus, turn: int) -> None:
        tensors = [gpu.tensor(np.ones(1 + turn % 3), pg.rank()) for _ in range(3)]
        works = [pg.allreduce(tensor, key=key) for tensor, key in zip(tensors, (None, "a", "b"), strict=True)]
        for work in (*works, pg.allreduce_coalesced(tensors)):
            await work
        sent = pg.send(tensors[0], 1 - pg.rank())
        await pg.recv(tensors[1], 1 - pg.rank())
        await sent

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        async def resources_after(turns: int) -> tuple[int, int, int]:
            for turn in range(turns):
                await call(pg, gpu, turn)
            await pg.barrier()
            gc.collect()
            live = gpu.cuda.live()
            # Each device thread may still reference the last call of each rank.
            assert sum(isinstance(each, Agreed) for each in gc.get_objects()) <= 2 * pg.size()
            assert live["events"] < 50
            assert live["memory"] < 500
            await pg.barrier()
            return live["streams"], live["pinned"], threading.active_count()

        first = await resources_after(5)
        for before, after in zip(first, await resources_after(50), strict=True):
            assert after <= before

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_noncontiguous_device_arrays_are_written_back(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.arange(12.0).reshape(3, 4), pg.rank())
        transposed = gpu.torch.Tensor(tensor.values.T, "float64", pg.rank())
        transposed.contiguous = lambda: gpu.tensor(tensor.values.T, pg.rank())
        assert await pg.allreduce(transposed) is transposed
        gpu.cuda.stream_synchronize(0, pg.rank())
        assert host(tensor).tolist() == (2 * np.arange(12.0).reshape(3, 4)).tolist()

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_collectives_on_single_device_tensors_give_correct_results(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        whole, part = gpu.tensor(np.zeros((size, 2)), rank), gpu.tensor(np.full(2, rank), rank, "float64")
        assert await pg.allgather_into_tensor(whole, part) is whole
        assert host(whole).tolist() == [[each] * 2 for each in range(size)]
        assert await pg.reduce_scatter_tensor(part, whole) is part
        assert host(part).tolist() == [rank * size] * 2
        out = gpu.tensor(np.zeros((size, 2)), rank)
        assert await pg.alltoall_base(out, whole) is out
        assert host(out).tolist() == [[rank] * 2] * size

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@both
async def test_allgather_accepts_an_input_inside_its_output(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        whole = gpu.tensor(np.zeros((2, 2)), pg.rank())
        await pg.allgather_into_tensor(whole, gpu.torch.Tensor(whole.values[pg.rank()], "float64", pg.rank()))
        assert host(whole).tolist() == [[0] * 2] * 2

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


# -- blocks, lists, call comparison, estimates


@both
async def test_blocks_and_lists_of_device_calls_give_correct_results(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        tensors = [gpu.tensor(np.full(3, each + 1.0), rank) for each in range(3)]
        array, number = np.ones(2), gpu.tensor(np.arange(4), rank)
        async with pg.coalescing():
            works = [pg.allreduce(each) for each in tensors]
            pg.allreduce(array)
            pg.broadcast(number, 1)
            sent = pg.send(tensors[0], (rank + 1) % 2, tag=4)
            taken = gpu.tensor(np.zeros(3), rank)
            pg.recv(taken, (rank + 1) % 2, tag=4)
            keyed = pg.allreduce(gpu.tensor(np.ones(1), rank), key="k")
        assert [host(work.result()).tolist() for work in works] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]
        assert array.tolist() == [2, 2]
        assert host(keyed.result()).tolist() == [2]
        assert sent.done()
        again = await pg.allreduce_coalesced([*tensors, array])
        assert again[0] is tensors[0]
        assert [host(each)[0] for each in tensors] == [4, 8, 12]
        assert array.tolist() == [4, 4]

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_blocks_that_differ_only_in_the_device_are_reported_as_a_mismatch(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        async def block() -> None:
            async with pg.coalescing():
                pg.allreduce(np.ones(2))
                pg.allreduce(gpu.tensor(np.ones(2), 1) if pg.rank() else np.ones(2))

        with pytest.raises(CollectiveMismatchError, match=r"member 1 is .*device=cuda"):
            await block()

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
async def test_group_with_debug_detail_reports_mismatches_of_device_calls_and_continues(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        for tensor in (gpu.tensor(np.ones(2 + pg.rank()), pg.rank()), gpu.tensor(np.ones(2), 1) if pg.rank() else 1.0):
            with pytest.raises(CollectiveMismatchError):
                await pg.allreduce(tensor)
        outputs = [gpu.tensor(np.ones(1), pg.rank()) for _ in range(1 + pg.rank())]
        with pytest.raises(CollectiveMismatchError):
            await pg.allgather(outputs, gpu.tensor(np.ones(1), pg.rank()))
        await check_allreduce(pg, gpu)
        async with pg.coalescing():
            work = pg.allreduce(gpu.tensor(np.ones(1), pg.rank()))
        assert host(work.result()).tolist() == [2]

    with gpus(2, way) as gpu:
        await testing.run_ranks(2, body, gpu, options=GroupOptions(debug="detail"))


async def test_estimate_refuses_device_arrays() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        with pg.time_estimator() as estimate:
            with pytest.raises(TypeError, match="ALLREDUCE is on CUDA arrays"):
                pg.allreduce(gpu.tensor(np.ones(2), 0))
            pg.allreduce(1)
        assert len(estimate.calls) == 1

    await run_with_gpus(1, body)


async def test_premul_sum_factor_is_applied_on_the_device() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.ones(2, np.float32), pg.rank())
        await pg.allreduce(tensor, ReduceOp.PREMUL_SUM(pg.rank() + 2.0))
        assert host(tensor).tolist() == [5, 5]

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)
        assert gpu.cuda.calls["scale"] == 2


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64"])
async def test_device_calls_that_nccl_supports_are_not_staged(dtype: str, limits: Limits) -> None:
    limits(device_slot_wait=1e6)  # on a loaded machine, calls that wait for long are staged

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()

        def new(count: int = 3) -> Any:
            return gpu.tensor(np.ones(count, numpy_dtype(dtype)), rank)

        uneven = [new(1 + each) for each in range(size)]
        works = [
            pg.allreduce(new()),
            pg.reduce(new(), 1, ReduceOp.SUM),
            pg.broadcast(new(), 1),
            pg.allgather([new() for _ in range(size)], new()),
            pg.allgather(uneven, new(1 + rank)),
            pg.gather([new() for _ in range(size)] if rank == 1 else None, new(), 1),
            pg.scatter(new(), [new() for _ in range(size)] if rank == 1 else None, 1),
            pg.reduce_scatter(new(1 + rank), [new(1 + each) for each in range(size)]),
            pg.reduce_scatter_tensor(new(), new(3 * size)),
            pg.alltoall([new() for _ in range(size)], [new() for _ in range(size)]),
        ]
        if "int" not in dtype and dtype != "bool":
            works += [pg.allreduce(new(), ReduceOp.AVG), pg.allreduce(new(), ReduceOp.PREMUL_SUM(2.0))]
        for work in works:
            await work

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)
        assert gpu.cuda.calls["copy_to_host"] == gpu.cuda.calls["copy_to_device"] == 0


async def test_empty_device_arrays_launch_no_nccl_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        await pg.barrier()
        before = gpu.cuda.calls["event_synchronize"]
        await pg.barrier()
        for _ in range(3):
            await pg.allreduce(gpu.tensor(np.ones(0), pg.rank()))
            await pg.allreduce(gpu.tensor(np.ones(0, int), pg.rank()), ReduceOp.BXOR)
        await pg.barrier()
        assert gpu.cuda.calls["event_synchronize"] == before

    await run_with_gpus(2, body)


@both
async def test_allgather_accepts_an_input_that_partly_overlaps_its_own_output(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        memory = gpu.tensor(np.arange(3.0) + 10 * rank, rank)
        source, own = (gpu.torch.Tensor(memory.values[start : start + 2], "float64", rank) for start in (1, 0))
        other = gpu.tensor(np.zeros(2), rank)
        await pg.allgather([own, other] if rank == 0 else [other, own], source)
        assert memory.values[:2].tolist() == [10 * rank + 1, 10 * rank + 2]
        assert host(other).tolist() == [10 * (1 - rank) + 1, 10 * (1 - rank) + 2]

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_allgather_accepts_an_input_that_overlaps_two_adjacent_outputs() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        for counts in ([2, 2, 2], [1, 0, 2]):
            memory = gpu.tensor(np.zeros(9), rank)
            starts = [0, counts[0], counts[0] + counts[1]]
            parts = [memory.values[start : start + count] for start, count in zip(starts, counts, strict=True)]
            views = [gpu.torch.Tensor(part, "float64", rank) for part in parts]
            # On the last rank, the input starts inside this rank's output and ends after it.
            start = starts[2] + 1 if rank == 2 else 7
            elements = memory.values[start : start + counts[rank]]
            own = gpu.torch.Tensor(elements, "float64", rank)
            elements[:] = rank + 1
            await pg.allgather(views, own)
            assert [part.tolist() for part in parts] == [[peer + 1.0] * counts[peer] for peer in range(size)]
        await pg.barrier()
        await wait_until(lambda: not gpu.cuda._scratch)

    await run_with_gpus(3, body)


@both
async def test_device_calls_do_not_invalidate_a_stream_capture_on_another_stream(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        own, captured = gpu.stream(0), gpu.stream(0)
        gpu.torch.streams[0] = own
        gate = gpu.gate(0)
        work = pg.allreduce(gpu.tensor(np.ones(3), 0))
        gpu.cuda.capture(captured, True, blocking=True)
        gate.open()
        await work
        # Make the default stream current. Work on it would join the capture, so that the call is refused.
        gpu.torch.streams[0] = 0
        with pytest.raises(RuntimeError, match="being captured into a graph"):
            pg.allreduce(gpu.tensor(np.ones(3), 0))
        gpu.cuda.capture(captured, False)
        assert gpu.cuda.disturbed == []
        await check_allreduce(pg, gpu)
        gpu.cuda.fail_next("is_capturing", "unknown")
        with pytest.raises(DeviceError, match="unknown"):
            pg.allreduce(gpu.tensor(np.ones(3), 0))

    with gpus(1, way) as gpu:
        await run_ranks(1, body, gpu)


@both
async def test_completion_thread_does_not_invalidate_stream_captures(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        own, captured = gpu.stream(0), gpu.stream(0)
        gpu.torch.streams[0] = own
        waits = gpu.cuda.calls["event_synchronize"]
        gpu.cuda.capture(captured, True)
        gate = gpu.gate(0)
        work = pg.allreduce(gpu.tensor(np.ones(3), 0))
        await wait_until(lambda: gpu.cuda.calls["event_synchronize"] > waits)
        gate.open()
        await work
        gpu.cuda.capture(captured, False)
        assert gpu.cuda.disturbed == []

    with gpus(1, way) as gpu:
        await run_ranks(1, body, gpu)


async def test_hook_receives_nccl_or_the_host_transport_as_the_transport_of_a_device_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        carried = []

        class Carried:
            def on_end(self, info: Any) -> None:
                carried.append((info.op, info.transport))

        pg.add_hook(Carried())
        await pg.allreduce(gpu.tensor(np.ones(3), pg.rank()))
        await pg.scan(gpu.tensor(np.ones(3), pg.rank()))
        assert carried == [("ALLREDUCE", "nccl"), ("SCAN", "memory")]

    await run_with_gpus(2, body)


async def test_direct_nccl_launch_of_a_scan_is_refused() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await pg.scan(gpu.tensor(np.ones(3), pg.rank()))
        plan = next(plan for plan in plans_of(pg) if plan.signature.op == "SCAN")
        with pytest.raises(ValueError, match="NCCL cannot carry out scan: stage it"):
            native.make_enqueue(plan, native.PACKED)

    await run_with_gpus(1, body)


async def test_wrong_control_messages_about_devices_are_refused() -> None:
    """Check messages that can be decoded, so that only the device layer detects the error."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        state = dispatcher_of(pg).device_calls.state
        assert state is not None
        with pytest.raises(ValueError, match="names a rank outside the group"):
            state.messages.handle(0, {"match": [0, 5, 1], "batches": []})
        with pytest.raises(TypeError, match="'2' is not of type int"):
            cards.read_card({"library": "2"})

    await run_with_gpus(1, body)


async def test_internal_error_in_a_staged_call_fails_only_this_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        gate = gpu.gate(0)
        work = pg.scan(gpu.tensor(np.ones(3), 0))
        await wait_until(lambda: comm_of(pg).in_flight.pending)
        (operation,) = comm_of(pg).in_flight.pending
        operation._copy_outputs(None, ZeroDivisionError("a bug"))  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await work
        gate.open()
        await check_allreduce(pg, gpu)

    await run_with_gpus(1, body)


async def test_device_calls_work_with_more_shapes_than_the_call_cache_keeps() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        shapes = [(1,), (2,), (2, 1), (1, 2)]
        for shape in (*shapes, *((length,) for length in range(3, PLANS + 3)), *shapes):
            await pg.allreduce(gpu.tensor(np.ones(shape), 0))
        assert len(plans_of(pg)) <= PLANS

    await run_with_gpus(1, body)


async def test_on_stream_accepts_the_cuda_stream_protocol() -> None:
    class Stream:
        def __init__(self, address: int) -> None:
            self.address = address

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.address

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        stream = Stream(gpu.stream(0))
        work = pg.allreduce(gpu.tensor(np.ones(3), 0))
        await work.on_stream(stream)
        await work

    await run_with_gpus(1, body)


async def test_device_of_an_array_without_device_information_is_found_by_its_address() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        parts = [FakeArray(gpu.cuda, np.ones(2), device) for device in (0, 1)]
        with pytest.raises(TypeError, match=r"must be on one CUDA device, not on devices \[0, 1\]"):
            pg.reduce_scatter(parts[1], parts[:1])
        with pytest.raises(TypeError, match="must be on one CUDA device"):
            pg.allgather([parts[1]], parts[0])
        empty = FakeArray(gpu.cuda, np.ones(0), 1)
        assert await pg.allreduce(empty) is empty
        assert await pg.allreduce(parts[0]) is parts[0]

    with gpus(2) as gpu:
        await run_ranks(1, body, gpu)
