"""Coalescing blocks and list calls on CUDA arrays: one comparison, one NCCL call group, one launch."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    BackendUnavailableError,
    CollectiveMismatchError,
    GroupError,
    GroupOptions,
    ProcessGroup,
    ReduceOp,
    testing,
)
from aiocoll.gpu.calls.device_state import DeviceState
from aiocoll.gpu.device import Device

from ..internals import nccl_end, observe_methods, set_nccl_only
from ..ranks import run_ranks, wait_until
from .groups import (
    WAYS,
    Gpus,
    check_allreduce,
    check_block_of_every_kind,
    check_failure,
    clear_counts,
    gpus,
    host,
    run_with_gpus,
    start_list,
)

both = pytest.mark.parametrize("way", WAYS)
sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])

SUM, MAX = ReduceOp.SUM, ReduceOp.MAX


class Counts:
    """Counts of NCCL calls, launches and call comparisons since `clear`, over all ranks."""

    def __init__(self, gpu: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nccl: Counter[str] = Counter()
        self.launches = 0
        self.agreements = 0
        gpu.nccl.hooks.append(lambda call: self.nccl.update([call]))
        observe_methods(monkeypatch, Device, launch=self._count_launch)
        observe_methods(monkeypatch, DeviceState, compare_calls=self._count_agreement)

    def _count_launch(self, *_: Any, **__: Any) -> None:
        self.launches += 1

    def _count_agreement(self, *_: Any) -> None:
        self.agreements += 1

    def clear(self) -> None:
        self.nccl.clear()
        self.launches = self.agreements = 0


@both
@sizes
async def test_block_of_every_kind_of_call_gives_correct_results(way: str, world_size: int) -> None:
    with gpus(world_size, way) as gpu:
        await run_ranks(world_size, check_block_of_every_kind, gpu)


@sizes
async def test_coalescing_block_is_launched_once_as_one_nccl_call_group(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, counts: Counts) -> None:
        await check_allreduce(pg, gpu)
        await clear_counts(pg, counts)
        await check_block_of_every_kind(pg, gpu)
        await pg.barrier()
        assert counts.nccl["group_start"] == counts.nccl["group_end"] == pg.size()
        assert counts.nccl["all_reduce"] == 3 * pg.size()
        assert (counts.launches, counts.agreements) == (pg.size(), 1)

    with gpus(world_size) as gpu:
        await run_ranks(world_size, body, gpu, Counts(gpu, monkeypatch))


async def test_each_list_call_is_one_nccl_call_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, counts: Counts) -> None:
        rank, size = pg.rank(), pg.size()
        await check_allreduce(pg, gpu)
        await clear_counts(pg, counts)
        ones = [gpu.tensor(np.full(each, each + 1.0), rank) for each in range(5)]
        assert await pg.allreduce_coalesced(ones) == ones
        assert [host(each).tolist() for each in ones] == [[size * (each + 1)] * each for each in range(5)]
        wholes = [gpu.tensor(np.zeros(2 * size), rank) for _ in range(2)]
        own = [gpu.tensor(np.full(2, rank + 10.0 * each), rank) for each in range(2)]
        await pg.allgather_into_tensor_coalesced(wholes, own, key="gathered")
        for at, each in enumerate(wholes):
            assert host(each).tolist() == [peer + 10 * at for peer in range(size) for _ in range(2)]
        await pg.reduce_scatter_tensor_coalesced(own, wholes, MAX)
        assert [host(each).tolist() for each in own] == [[rank + 10 * at] * 2 for at in range(2)]
        await pg.barrier()
        assert counts.nccl["group_start"] == counts.nccl["group_end"] == 3 * size
        assert (counts.launches, counts.agreements) == (3 * size, 1)  # only the keyed list call needs an agreement

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu, Counts(gpu, monkeypatch))


@sizes
async def test_calls_of_a_block_that_nccl_does_not_support_are_staged(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, counts: Counts) -> None:
        rank, size = pg.rank(), pg.size()
        await check_allreduce(pg, gpu)
        await clear_counts(pg, counts)
        stream = gpu.stream(rank)
        gate = gpu.cuda.gate(stream, rank)
        first, last = (gpu.tensor(np.full(3, rank + 1.0), rank) for _ in range(2))
        bits, scanned = gpu.tensor(np.full(2, 1 << rank), rank), gpu.tensor(np.ones(4), rank)
        gpu.cuda.kernel(stream, lambda: [np.add(host(each), 1, out=host(each)) for each in (bits, last)], rank)
        async with pg.coalescing():
            works = [pg.allreduce(first), pg.allreduce(bits, ReduceOp.BXOR), pg.scan(scanned), pg.allreduce(last)]
            asyncio.get_running_loop().call_later(0.01, gate.open)
        assert all(work.done() for work in works)
        total = size * (size + 1) // 2
        assert host(first).tolist() == [total] * 3
        assert host(last).tolist() == [total + size] * 3
        assert host(bits).tolist() == [np.bitwise_xor.reduce([(1 << peer) + 1 for peer in range(size)])] * 2
        assert host(scanned).tolist() == [rank + 1] * 4
        await pg.barrier()
        assert counts.nccl["group_start"] == counts.nccl["group_end"] == size
        assert (counts.launches, counts.agreements) == (5 * size, 1)

    with gpus(world_size) as gpu:
        await run_ranks(world_size, body, gpu, Counts(gpu, monkeypatch))


@both
async def test_block_of_only_staged_calls_completes(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensors = [gpu.tensor(np.full(2, 1 << pg.rank()), pg.rank()) for _ in range(3)]
        await pg.allreduce_coalesced([*tensors, gpu.tensor(np.zeros(0, int), pg.rank())], ReduceOp.BOR)
        assert [host(each).tolist() for each in tensors] == [[7, 7]] * 3

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@both
async def test_list_call_on_empty_arrays_completes(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        empty = [gpu.tensor(np.zeros(0), pg.rank()) for _ in range(3)]
        assert await pg.allreduce_coalesced(empty) == empty

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_keyed_list_calls_and_keyed_calls_of_several_tasks_complete() -> None:
    """Start keyed list calls and keyed calls in different orders on different ranks."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        async def one(name: int) -> None:
            for turn in range(5):
                tensors = [gpu.tensor(np.full(2, pg.rank() + name + turn), pg.rank()) for _ in range(3)]
                await pg.allreduce_coalesced(tensors[:2], key=f"list {name}")
                await pg.allreduce(tensors[2], key=f"one {name}")
                assert [host(each)[0] for each in tensors] == [3 * (name + turn) + 3] * 3

        names = range(3) if pg.rank() != 1 else reversed(range(3))
        await asyncio.gather(*(one(name) for name in names))

    await run_with_gpus(3, body)


# -- refused blocks


@both
async def test_block_whose_calls_share_memory_is_refused(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        whole = gpu.tensor(np.ones(6), rank)

        def part(start: int, stop: int) -> Any:
            return gpu.torch.Tensor(whole.values[start:stop], "float64", rank)

        async def block() -> None:
            async with pg.coalescing():
                pg.allreduce(np.ones(2))
                pg.allreduce(part(0, 3))
                pg.broadcast(part(2, 5), 0)

        with pytest.raises(ValueError, match=r"members 1 \(ALLREDUCE\) and 2 \(BROADCAST\) .* share memory"):
            await block()
        with pytest.raises(ValueError, match=r"members 0 .* and 1 .* share memory"):
            pg.allreduce_coalesced([whole, whole])
        # Allowed: two calls of a block read the same memory, or write to adjacent memory.
        out = [gpu.tensor(np.zeros(12), rank) for _ in range(2)]
        await pg.allgather_into_tensor_coalesced(out, [whole, whole])
        await pg.allreduce_coalesced([part(0, 3), part(3, 6)])
        assert host(whole).tolist() == [2] * 6
        assert [host(each).tolist() for each in out] == [[1] * 12] * 2

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@both
@pytest.mark.parametrize("what", ["count", "op", "length", "order"])
async def test_different_coalescing_blocks_of_device_calls_are_reported_as_a_mismatch(way: str, what: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        last = pg.rank() == 2
        tensors = [gpu.tensor(np.ones(3 + each), pg.rank()) for each in range(3)]

        async def block() -> None:
            async with pg.coalescing():
                pg.allreduce(tensors[0])
                if last and what == "count":
                    pg.allreduce(gpu.tensor(np.ones(7), pg.rank()))
                elif last and what == "order":
                    pg.allreduce(tensors[2])
                    pg.allreduce(tensors[1])
                    return
                elif last and what == "op":
                    pg.allreduce(tensors[1], MAX)
                elif not (last and what == "length"):
                    pg.allreduce(tensors[1])
                pg.allreduce(tensors[2])

        with pytest.raises(CollectiveMismatchError, match=r"member 1 is ALLREDUCE\(.* on rank \d, ALLREDUCE"):
            await block()
        assert [host(each).max() for each in tensors] == [1] * 3

    with gpus(3, way) as gpu:
        await run_ranks(3, body, gpu)


@both
async def test_blocks_with_different_exchange_counts_are_reported_as_a_mismatch(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        inputs = [gpu.tensor(np.ones(2 + (rank == 1 and peer == 0)), rank) for peer in range(2)]
        outputs = [gpu.tensor(np.zeros(2), rank) for _ in range(2)]
        one = gpu.tensor(np.ones(3), rank)

        async def block() -> None:
            async with pg.coalescing():
                pg.allreduce(one)
                pg.alltoall(outputs, inputs)

        with pytest.raises(CollectiveMismatchError, match=r"member 1 is ALLTOALL"):
            await block()
        assert host(one).tolist() == [1] * 3
        # The ranks compared their blocks before they transferred data, so the group continues.
        await check_allreduce(pg, gpu)

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_list_call_in_an_nccl_only_group_raises_an_error_without_nccl() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        set_nccl_only(pg, True)
        with pytest.raises(BackendUnavailableError, match="must use NCCL, but rank 0"):
            await pg.allreduce_coalesced([gpu.tensor(np.ones(2), pg.rank()) for _ in range(2)])

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


# -- cancelled and aborted blocks; for failures, see `test_groups_failing`


async def test_cancelled_await_leaves_the_block_in_flight() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        gate = gpu.gate(pg.rank())
        tensors = [gpu.tensor(np.ones(3), pg.rank()) for _ in range(2)]
        work = pg.allreduce_coalesced(tensors)
        waiting = asyncio.ensure_future(work.join())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not work.done()
        gate.open()
        assert await work == tensors
        assert host(tensors[1]).tolist() == [2] * 3

    await run_with_gpus(2, body)


@both
async def test_exception_inside_a_block_starts_no_calls(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensors = [gpu.tensor(np.ones(3), pg.rank()) for _ in range(2)]
        works: list[Any] = []

        async def block() -> None:
            async with pg.coalescing():
                works.extend(pg.allreduce(each) for each in tensors)
                raise KeyError("no")

        with pytest.raises(KeyError):
            await block()
        for work in works:
            assert isinstance(work.exception(), GroupError)
        await check_allreduce(pg, gpu)
        assert host(tensors[0]).tolist() == [1] * 3

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_group_with_debug_detail_reports_mismatches_of_list_calls_and_continues() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_block_of_every_kind(pg, gpu)
        with pytest.raises(CollectiveMismatchError, match="member 1"):
            await pg.allreduce_coalesced(
                [gpu.tensor(np.ones(2), pg.rank()), gpu.tensor(np.ones(2 + pg.rank()), pg.rank())]
            )
        await check_block_of_every_kind(pg, gpu)

    with gpus(2) as gpu:
        await testing.run_ranks(2, body, gpu, options=GroupOptions(debug="detail"))


async def test_abort_of_the_communicator_waits_until_the_launcher_has_ended_its_nccl_call_group() -> None:
    calling, go_on = threading.Event(), threading.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await check_allreduce(pg, gpu)
        end: Any = nccl_end(pg)

        def slow(call: str) -> None:
            if call == "group_end":
                calling.set()
                assert go_on.wait(10)

        gpu.nccl.hooks.append(slow)
        work = start_list(pg, gpu)
        await wait_until(calling.is_set)
        pg.abort("enough")
        await check_failure(pg, work, "enough")
        assert not end.aborted
        go_on.set()
        await wait_until(lambda: end.aborted)

    await run_with_gpus(1, body)


async def test_allgather_into_separate_output_arrays_on_one_rank_uses_scratch_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, counts: Counts) -> None:
        rank, size = pg.rank(), pg.size()
        await check_allreduce(pg, gpu)
        await clear_counts(pg, counts)
        whole, one = gpu.tensor(np.zeros((size, 2)), rank), gpu.tensor(np.ones(2), rank)
        # The outputs are adjacent rows of one array, except on rank 0, where they are separate arrays.
        parts = [gpu.torch.Tensor(row, "float64", rank) for row in whole.values]
        separate = [gpu.tensor(np.zeros(2), rank) for _ in range(size)]
        async with pg.coalescing():
            pg.allgather(parts if rank else separate, gpu.tensor(np.full(2, rank + 1.0), rank))
            pg.allreduce(one)
        gathered = host(whole) if rank else np.stack([host(each) for each in separate])
        assert gathered.tolist() == [[peer + 1] * 2 for peer in range(size)]
        assert host(one).tolist() == [size] * 2
        await pg.barrier()
        assert (counts.nccl["all_gather"], counts.nccl["broadcast"]) == (size, 0)
        assert gpu.cuda.calls["scratch"] == 1
        assert counts.nccl["group_start"] == counts.launches == size

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu, Counts(gpu, monkeypatch))


@both
async def test_noncontiguous_arrays_of_a_block_are_written_back(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        whole = gpu.tensor(np.full((4, 4), rank + 1), rank)
        columns = []
        for values in whole.values.T[:3]:
            columns.append(gpu.torch.Tensor(values, "int64", rank))
            columns[-1].contiguous = lambda values=values: gpu.tensor(values, rank)
        async with pg.coalescing():
            pg.allreduce(columns[0])
            pg.allreduce(columns[1], ReduceOp.BOR)
            work = pg.broadcast(columns[2], 0)
        assert work.result() is columns[2]
        gpu.cuda.stream_synchronize(0, rank)
        assert host(whole).tolist() == [[size * (size + 1) // 2, 3, 1, rank + 1]] * 4

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


async def test_list_call_on_many_arrays_is_one_nccl_call_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, counts: Counts) -> None:
        rank, size = pg.rank(), pg.size()
        await check_allreduce(pg, gpu)
        await clear_counts(pg, counts)
        whole = gpu.tensor(np.full((500, 3), rank + 1), rank)
        rows = [gpu.torch.Tensor(row, "int64", rank) for row in whole.values]
        assert await pg.allreduce_coalesced(rows) == rows
        assert (host(whole) == size * (size + 1) // 2).all()
        await pg.barrier()
        assert counts.nccl["group_start"] == counts.launches == size

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu, Counts(gpu, monkeypatch))
