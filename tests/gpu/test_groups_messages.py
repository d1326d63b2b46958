"""Staged messages of CUDA arrays, which behave like messages of host arrays."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    PROC_NULL,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Envelope,
    GroupError,
    ProcessGroup,
    Recv,
    Send,
)

from ..internals import comm_of
from ..ranks import LINKS, run_ranks
from ..reductions import WIDE, data
from .groups import Gpus, end_group, gpus, host


@pytest.mark.parametrize("transport", LINKS)
async def test_device_messages_of_any_length_and_dtype_arrive(transport: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        for dtype in WIDE:
            for count in (0, 1, 5):
                await exchange(pg, gpu, data(dtype, "SUM", 0, 0, count))
        await exchange(pg, gpu, np.arange(300_000))
        assert rank == pg.rank()

    async def exchange(pg: ProcessGroup, gpu: Gpus, values: Any) -> None:
        if pg.rank() == 0:
            tensor = gpu.tensor(values, 0)
            assert await pg.send(tensor, 1, tag=7) is tensor
        else:
            tensor = gpu.tensor(np.zeros_like(values), 1)
            work = pg.recv(tensor, 0, tag=7)
            assert await work is tensor
            assert work.source_rank() == 0
        assert host(tensor).tobytes() == values.tobytes()

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu, transport=transport)


async def test_message_does_not_overtake_an_earlier_device_message_that_is_still_being_copied() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            gate = gpu.gate(0)
            works = [pg.send(gpu.tensor(np.full(2, 1.0), 0), 1), pg.send(np.full(2, 2.0), 1)]
            works.append(pg.send(gpu.tensor(np.full(200_000, 3.0), 0), 1))
            await works[1]
            assert not works[0].done()
            gate.open()
            await asyncio.gather(*(work.join() for work in works))
        else:
            first, second, third = np.zeros(2), gpu.tensor(np.zeros(2), 1), np.zeros(200_000)
            for each in (first, second, third):
                await pg.recv(each, 0)
            assert first.tolist() == [1, 1]
            assert host(second).tolist() == [2, 2]
            assert (third == 3).all()

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_device_receives_posted_before_their_messages_match_in_send_order() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            first, second = np.zeros(2), np.zeros(2)
            works = [pg.recv(first, 1), pg.recv(second, 1)]
            await pg.barrier()
            await asyncio.gather(*(work.join() for work in works))
            assert (first[0], second[0]) == (1, 2)
        else:
            await pg.barrier()
            gate = gpu.gate(1)
            works = [pg.send(gpu.tensor(np.full(2, 1.0), 1), 0), pg.send(np.full(2, 2.0), 0)]
            await works[1]
            gate.open()
            await works[0]

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_device_receives_match_messages_of_any_rank_and_of_batches() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        if rank == 0:
            found = {}
            for _ in range(size - 1):
                work = pg.recv_anysource(gpu.tensor(np.zeros(1), 0))
                found[work] = host(await work)[0]
            assert {work.source_rank(): value for work, value in found.items()} == {1: 1, 2: 2}
        else:
            await pg.send(gpu.tensor(np.full(1, float(rank)), rank), 0)
        right, left = (rank + 1) % size, (rank - 1) % size
        out, into = gpu.tensor(np.full(3, rank), rank), gpu.tensor(np.zeros(3, int), rank)
        there, here = np.full(2, rank), np.zeros(2, int)
        result = await pg.batch([Send(out, right), Recv(into, left), Recv(here, left, 1), Send(there, right, 1)])
        assert result[1] is into
        assert host(into).tolist() == [left] * 3
        assert here.tolist() == [left] * 2
        with pytest.raises(ValueError, match="share memory"):
            pg.batch([Recv(into, left), Recv(into, right)])

    with gpus(3, "staged") as gpu:
        await run_ranks(3, body, gpu)


async def test_incoming_iterator_yields_device_messages() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            gate = gpu.gate(0)
            works = [pg.send(gpu.tensor(np.full(count, 1.0), 0), 1) for count in (2, 200_000)]
            await pg.barrier()
            gate.open()
            for work in works:
                await work
        else:
            incoming = pg.incoming()
            first = asyncio.ensure_future(anext(incoming))
            await pg.barrier()
            assert (await first)[1].tolist() == [1, 1]
            assert (await anext(incoming))[1].sum() == 200_000

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_device_message_that_was_announced_before_its_copy_is_freed_after_sending() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            await pg.barrier()
            gate = gpu.gate(0)
            sent = weakref.ref(work := pg.send(gpu.tensor(np.ones(2), 0), 1))
            gate.open()
            await work
            del work
            assert not comm_of(pg).channels[1]._blocked
            await pg.barrier()
            gc.collect()
            assert sent() is None
        else:
            await pg.barrier()
            await pg.barrier()
            await pg.recv(np.zeros(2), 0)

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_device_receive_without_awaiters_is_withdrawn() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.zeros(1), pg.rank())
        if pg.rank() == 0:
            waiting = asyncio.ensure_future(pg.recv(tensor, 1).join())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0)
            with pytest.raises(CollectiveTimeoutError, match="received no message with tag 0 from rank 1"):
                await pg.recv(tensor, 1, timeout=0.01)
            await pg.barrier()
            assert host(await pg.recv(tensor, 1)).tolist() == [4]
        else:
            await pg.barrier()
            await pg.send(gpu.tensor(np.full(1, 4.0), 1), 0)

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


async def test_device_message_of_another_length_is_reported_as_a_mismatch() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.zeros(2 + pg.rank()), pg.rank())
        work = pg.recv(tensor, 0) if pg.rank() else pg.send(tensor, 1)
        error = await pg.wait_revoked()
        assert isinstance(error, CollectiveMismatchError)
        assert re.search(r"shape=\[2\].*shape=\[3\]", str(error))
        await asyncio.wait([work.get_future()])

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


class BlockedLocking:
    """A patch that records the threads that lock pages, and blocks them until `go` is set."""

    def __init__(self, gpu: Gpus) -> None:
        self.threads: list[int] = []
        self.go = threading.Event()
        gpu.cuda.hooks.append(self._called)

    def _called(self, call: str) -> None:
        if call == "pinned":
            self.threads.append(threading.get_ident())
            assert self.go.wait(10)


async def test_event_loop_thread_never_allocates_page_locked_memory() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        for count in (1, 3000, 300_000):
            tensor = gpu.tensor(np.full(count, float(rank)), rank)
            await (pg.recv(tensor, 0) if rank else pg.send(tensor, 1))
            assert not host(tensor).any()
            await pg.allreduce(tensor)

    with gpus(2, "staged") as gpu:
        locking = BlockedLocking(gpu)
        locking.go.set()
        await run_ranks(2, body, gpu)
    assert len(locking.threads) >= 6
    assert threading.get_ident() not in locking.threads


async def test_device_receives_keep_their_order_while_they_wait_for_page_locked_memory() -> None:
    counts = (1, 300_000, 0)  # counts of an eager, a granted and an empty message

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            await asyncio.gather(*(pg.send(np.full(count, count), 1).join() for count in (*counts, 2, *counts)))
        else:
            early = [pg.recv(gpu.tensor(np.zeros(count, int), 1), 0) for count in counts]
            last = np.zeros(2, int)
            await pg.recv(last, 0)
            assert last.tolist() == [2, 2]
            late = [pg.recv(gpu.tensor(np.zeros(count, int), 1), 0) for count in counts]
            await asyncio.sleep(0)
            assert not any(work.done() for work in early + late)
            locking.go.set()
            for work, count in zip(early + late, counts * 2, strict=True):
                assert host(await work).tolist() == [count] * count
                assert work.source_rank() == 0

    with gpus(2, "staged") as gpu:
        locking = BlockedLocking(gpu)
        await run_ranks(2, body, gpu)


async def test_matched_device_receive_that_waits_for_page_locked_memory_cannot_be_withdrawn() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            await pg.send(np.full(1, 1.0), 1)
            await pg.send(np.full(1, 2.0), 1)
            await pg.barrier()
        else:
            tensor, after = gpu.tensor(np.zeros(1), 1), np.zeros(1)
            waiting = asyncio.ensure_future((work := pg.recv(tensor, 0)).join())
            await pg.recv(after, 0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert not work.done()
            locking.go.set()
            await work
            assert (host(tensor).tolist(), after.tolist()) == ([1], [2])
            await pg.barrier()

    with gpus(2, "staged") as gpu:
        locking = BlockedLocking(gpu)
        await run_ranks(2, body, gpu)


async def test_end_of_the_group_frees_page_locked_memory_that_is_allocated_later() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 1:
            works = [pg.recv(gpu.tensor(np.ones(9), 1), 0) for _ in range(2)]
            await pg.recv(np.ones(1), 0)
            pg.abort("enough")
            locking.go.set()
            for work in works:
                with pytest.raises(GroupError, match="enough"):
                    await work
        else:
            await pg.send(np.ones(9), 1)
            await pg.send(np.ones(9), 1)
            await pg.send(np.ones(1), 1)
            await pg.wait_revoked()

    with gpus(2, "staged") as gpu:
        locking = BlockedLocking(gpu)
        await run_ranks(2, body, gpu)
        assert gpu.shared_device(1).close(10.0)
        assert gpu.cuda.live()["pinned"] == 0


@pytest.mark.parametrize("sender", [0, 1])
async def test_failed_allocation_of_page_locked_memory_fails_the_group(sender: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        works = []
        if pg.rank() == 0:
            gpu.cuda.fail_next("pinned", "out of memory")
            tensor = gpu.tensor(np.zeros(2), 0)
            works.append(pg.send(tensor, 1) if sender == 0 else pg.recv(tensor, 1))
        error = await pg.wait_revoked()
        assert re.match(r"(SEND|RECV) of .* failed on rank 0, device 0: pinned: out of memory", str(error))
        await asyncio.gather(*(work.get_future() for work in works), return_exceptions=True)

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("sender", [0, 1])
async def test_failed_staging_copy_of_a_message_fails_the_group(sender: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = gpu.tensor(np.zeros(2), pg.rank())
        if pg.rank() == 0:
            gpu.cuda.fail_next("copy_to_host" if sender == 0 else "copy_to_device")
        work = pg.send(tensor, 1 - sender) if pg.rank() == sender else pg.recv(tensor, sender)
        error = await pg.wait_revoked()
        assert re.match(r"(SEND|RECV) of .* failed on rank 0, device 0: copy_to_(host|device): invalid", str(error))
        await asyncio.wait([work.get_future()])

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("end", ["abort", "shutdown"])
async def test_end_of_the_group_fails_device_messages_that_are_being_copied(end: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        gate = gpu.gate(pg.rank())
        other = 1 - pg.rank()
        works = [pg.send(gpu.tensor(np.ones(9), pg.rank()), other), pg.recv(gpu.tensor(np.ones(9), pg.rank()), other)]
        await pg.barrier()
        await end_group(pg, works, end, gate)

    with gpus(2, "staged") as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("called", [False, True])
async def test_batch_with_a_refused_device_array_starts_no_message(called: bool) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        if called:
            await pg.allreduce(gpu.tensor(np.ones(1), rank))
        first = gpu.tensor(np.ones(1), rank)
        with pytest.raises(ValueError, match="make a group for each device"):
            pg.batch([Send(np.ones(1), 1 - rank), Send(first, 1 - rank), Send(gpu.tensor(np.ones(1), 2), 1 - rank)])
        assert not comm_of(pg).in_flight.pending
        stream = gpu.stream(rank)
        gpu.cuda.capture(stream, True, rank)
        with pytest.raises(RuntimeError, match="captured into a graph"):
            pg.batch([Send(np.ones(1), 1 - rank), Recv(gpu.tensor(np.ones(1), rank), 1 - rank)])
        gpu.cuda.capture(stream, False, rank)
        assert not comm_of(pg).in_flight.pending
        assert not comm_of(pg).matching._sent

    with gpus(3) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("way", ["staged", "nccl"])
async def test_proc_null_messages_to_self_and_probes_work_with_device_arrays(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, other = pg.rank(), 1 - pg.rank()
        mine, untouched = gpu.tensor(np.full(200_000, rank), rank), gpu.tensor(np.full(3, 7), rank)
        assert pg.send(mine, PROC_NULL).done()
        assert await pg.recv(untouched, PROC_NULL) is untouched
        # Messages with PROC_NULL do not count toward the batch that the peer waits for.
        got = gpu.tensor(np.zeros(200_000, int), rank)
        await pg.batch([Send(mine, other), Recv(untouched, PROC_NULL), Recv(got, other), Send(mine, PROC_NULL)])
        assert (host(got) == other).all()
        assert (host(untouched) == 7).all()
        with pytest.raises(TypeError, match=r"CUDA array, and dst=\d is this rank: copy it on the device"):
            pg.send(mine, rank)
        receiving = pg.recv(untouched, rank, tag=1)
        await pg.send(np.full(3, 5), rank, tag=1)
        assert (host(await receiving) == 5).all()
        sending = pg.send(mine, other, tag=2)
        envelope = await pg.probe(other, tag=2)
        assert envelope == Envelope(other, 2, 1_600_000, np.dtype(int))
        await pg.recv(got, other, tag=2)
        await sending

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("way", ["staged", "nccl"])
async def test_planned_device_calls_can_be_started_repeatedly(way: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        x = gpu.tensor(np.full(5, 1.0), pg.rank())
        plan = pg.plan(pg.allreduce, x)
        for step in range(1, 4):
            await plan.start()
            assert (host(x) == 2.0**step).all()
        send, y = pg.plan(pg.send, x, 1 - pg.rank()), gpu.tensor(np.zeros(5), pg.rank())
        for _ in range(2):
            work = send.start()
            assert (host(await pg.recv(y, 1 - pg.rank())) == 8).all()
            await work

    with gpus(2, way) as gpu:
        await run_ranks(2, body, gpu)
