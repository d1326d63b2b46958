"""Messages of CUDA arrays in groups with NCCL, which transfers messages longer than the eager window."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    PeerLostError,
    ProcessGroup,
    Recv,
    Send,
)
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.gpu.calls import matching
from aiocoll.gpu.calls.matching import BatchMatching

from ..internals import Limits, comm_of, dispatcher_of, matched_units, matching_of
from ..ranks import LINKS, run_ranks, wait_until
from ..reductions import WIDE
from .groups import Gpus, check_allreduce, clear_counts, gpus, host, run_with_gpus, uses_nccl

#: Element counts for 8-byte elements: the shortest message that NCCL transfers, and the longest that NCCL does not.
LARGE, SMALL = EAGER_WINDOW // 8 + 1, EAGER_WINDOW // 8


def count_nccl_calls(gpu: Gpus) -> Counter[str]:
    """Return a counter of later NCCL calls and allocations of page-locked memory, over all ranks."""
    counted: Counter[str] = Counter()
    gpu.nccl.hooks.append(lambda call: counted.update([call]))
    gpu.cuda.hooks.append(lambda call: counted.update([call] * (call == "pinned")))
    return counted


async def create_communicator(pg: ProcessGroup, gpu: Gpus) -> None:
    """Create the NCCL communicator by a first allreduce."""
    await check_allreduce(pg, gpu)


def filled(gpu: Gpus, rank: int, value: float, count: int = LARGE) -> Any:
    return gpu.tensor(np.full(count, value), rank)


def has_value(tensor: Any, value: float) -> bool:
    return bool((host(tensor) == value).all())


@pytest.mark.parametrize("transport", LINKS)
async def test_long_messages_use_nccl_and_short_messages_are_sent_eagerly(transport: str, limits: Limits) -> None:
    limits(device_check_interval=1e6)  # checks for asynchronous errors are NCCL calls, too

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        await clear_counts(pg, counted)
        if rank == 0:
            assert await pg.send(short := filled(gpu, 0, 1, SMALL), 1) is short
            await pg.barrier()
            assert await pg.send(long := filled(gpu, 0, 2), 1, tag=9) is long
        else:
            await pg.barrier()
            assert has_value(await pg.recv(filled(gpu, 1, 0, SMALL), 0), 1)
            assert counted["send"] == counted["recv"] == 0
            counted.clear()
            work = pg.recv(tensor := filled(gpu, 1, 0), 0, tag=9)
            assert await work is tensor
            assert work.source_rank() == 0
            assert has_value(tensor, 2)
            assert counted == {"send": 1, "recv": 1, "group_start": 2, "group_end": 2}

    with gpus(2) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(2, body, gpu, transport=transport)


async def test_nccl_messages_of_every_dtype_are_sent_without_a_staging_copy() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        if rank == 0:
            counted.clear()
        await pg.barrier()
        for dtype in WIDE:
            count = EAGER_WINDOW // np.dtype(dtype).itemsize + 1
            values = (np.arange(count) % 2).astype(dtype)
            tensor = gpu.tensor(values if rank == 0 else np.zeros_like(values), rank)
            await (pg.recv(tensor, 0) if rank else pg.send(tensor, 1))
            assert host(tensor).tobytes() == values.tobytes()

    with gpus(2) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(2, body, gpu)
        assert counted["send"] == counted["recv"] == len(WIDE)
        assert not counted["pinned"]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
async def test_ring_exchange_in_a_batch_is_one_nccl_call_group(world_size: int, limits: Limits) -> None:
    limits(device_batch_wait=1e6, device_check_interval=1e6)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        await create_communicator(pg, gpu)
        await clear_counts(pg, counted)
        for turn in range(3):
            sent, received = filled(gpu, rank, rank + turn), filled(gpu, rank, -1)
            result = await pg.batch([Recv(received, (rank - 1) % size), Send(sent, (rank + 1) % size)])
            assert result == [received, sent]
            assert has_value(received, (rank - 1) % size + turn)

    with gpus(world_size) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(world_size, body, gpu)
        each = 3 * world_size
        assert counted == {"send": each, "recv": each, "group_start": each, "group_end": each, "destroy": world_size}


async def test_messages_of_a_block_are_one_nccl_call_group(limits: Limits) -> None:
    limits(device_batch_wait=1e6)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        await create_communicator(pg, gpu)
        await clear_counts(pg, counted)
        into = {peer: filled(gpu, rank, -1) for peer in range(size) if peer != rank}
        short = filled(gpu, rank, -1, 3)
        async with pg.coalescing():
            for peer, tensor in into.items():
                pg.recv(tensor, peer)
            for peer in into:
                pg.send(filled(gpu, rank, rank), peer)
            pg.send(filled(gpu, rank, rank, 3), (rank + 1) % size, tag=1)
            pg.recv(short, (rank - 1) % size, tag=1)
            summed = pg.allreduce(filled(gpu, rank, 1))
        assert has_value(short, (rank - 1) % size)
        assert has_value(await summed, size)
        assert all(has_value(tensor, peer) for peer, tensor in into.items())

    with gpus(3) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(3, body, gpu)
        assert (counted["send"], counted["recv"], counted["all_reduce"]) == (6, 6, 3)
        assert counted["group_start"] == counted["group_end"] == 3


async def test_all_ranks_can_start_nccl_sends_before_their_receives() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        for _ in range(5):
            sent = [pg.send(filled(gpu, rank, rank), peer) for peer in range(pg.size()) if peer != rank]
            into = {peer: filled(gpu, rank, -1) for peer in range(pg.size()) if peer != rank}
            received = [pg.recv(tensor, peer) for peer, tensor in into.items()]
            await asyncio.gather(*(work.join() for work in [*received, *sent]))
            assert all(has_value(tensor, peer) for peer, tensor in into.items())

    await run_with_gpus(3, body)


async def test_order_of_nccl_messages_and_keyed_collectives_can_differ_between_ranks() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        for turn in range(10):
            summed, tensor = filled(gpu, rank, rank), filled(gpu, rank, turn if rank == 0 else -1)
            message = [lambda t=tensor: pg.recv(t, 0) if rank else pg.send(t, 1)]
            calls = [lambda s=summed: pg.allreduce(s, key="sum"), *(message if rank < 2 else [])]
            works = [call() for call in (calls if (rank + turn) % 2 else calls[::-1])]
            await asyncio.gather(*(work.join() for work in works))
            assert has_value(summed, 3)
            assert rank == 2 or has_value(tensor, turn)

    await run_with_gpus(3, body)


async def test_messages_of_a_batch_start_separately_if_other_ranks_wait_for_one_of_them() -> None:
    """Let rank 0 send a batch to ranks 1 and 2, where rank 2 first waits for a message of rank 1."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        if rank == 0:
            await pg.batch([Send(filled(gpu, 0, 1), 1), Send(filled(gpu, 0, 2), 2)])
        elif rank == 1:
            tensor = filled(gpu, 1, -1)
            await pg.recv(tensor, 0)
            await pg.send(tensor, 2)
        else:
            assert has_value(await pg.recv(filled(gpu, 2, -1), 1), 1)
            assert has_value(await pg.recv(filled(gpu, 2, -1), 0), 2)

    await run_with_gpus(3, body)


@pytest.mark.parametrize("sender", ["device", "host"])
async def test_device_array_can_be_received_into_a_host_array_and_vice_versa(sender: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        await clear_counts(pg, counted)
        for _ in range(2):
            on_device = (rank == 0) == (sender == "device")
            array = np.full(LARGE, 3.0 if rank == 0 else 0.0)
            tensor = gpu.tensor(array, rank) if on_device else array
            # The staged message must not delay the second message of the batch, which uses NCCL.
            other = filled(gpu, rank, 4 if rank == 0 else 0)
            if rank == 0:
                await pg.batch([Send(tensor, 1), Send(other, 1, tag=1)])
            else:
                work = pg.batch([Recv(tensor, None), Recv(other, 0, tag=1)])
                await work
                assert (array == 3).all() if sender == "device" else has_value(tensor, 3)
                assert has_value(other, 4)

    with gpus(2) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(2, body, gpu)
        assert counted["send"] == counted["recv"] == 2


async def test_incoming_iterator_takes_an_unexpected_device_message() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await create_communicator(pg, gpu)
        if pg.rank() == 0:
            await pg.send(filled(gpu, 0, 5), 1, tag=3)
        else:
            source, array = await anext(pg.incoming(3))
            assert (source, array.tolist()) == (0, [5.0] * LARGE)

    await run_with_gpus(2, body)


async def test_message_requested_by_an_incoming_iterator_is_staged() -> None:
    """Cancel the iterator after its request; a receive then takes the message."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await create_communicator(pg, gpu)
        await pg.barrier()
        if pg.rank() == 0:
            counted.clear()
            await pg.send(filled(gpu, 0, 5), 1, tag=3)
        else:
            await wait_until(lambda: comm_of(pg).matching._waiting)
            step = asyncio.ensure_future(anext(pg.incoming(3)))
            await asyncio.sleep(0)
            step.cancel()
            assert has_value(await pg.recv(filled(gpu, 1, 0), 0, tag=3), 5)
        await pg.barrier()
        assert not counted["send"] + counted["recv"]

    with gpus(2) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(2, body, gpu)


async def test_device_messages_of_each_sender_arrive_in_send_order() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        counts = (LARGE, SMALL, LARGE + 1, 1)
        if rank:
            works = [pg.send(filled(gpu, rank, 10 * rank + index, count), 0) for index, count in enumerate(counts)]
            await asyncio.gather(*(work.join() for work in works))
        else:
            last = {1: 0, 2: 0}
            for source in (1, 2):
                for index, count in enumerate(counts):
                    assert has_value(await pg.recv(filled(gpu, 0, -1, count), source), 10 * source + index)
            await pg.barrier()
            for _ in range(4):
                work = pg.recv_anysource(tensor := filled(gpu, 0, -1))
                await work
                source = work.source_rank()
                assert has_value(tensor, 100 * source + last[source])
                last[source] += 1
        if rank:
            await pg.barrier()
            for index in range(2):
                await pg.send(filled(gpu, rank, 100 * rank + index), 0)

    await run_with_gpus(3, body)


async def test_noncontiguous_device_array_receives_a_message_in_place() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        tensor = gpu.tensor(np.arange(2.0 * LARGE).reshape(LARGE, 2) * (1 - rank), rank)
        turned = gpu.torch.Tensor(tensor.values.T, "float64", rank)
        turned.contiguous = lambda: gpu.tensor(tensor.values.T, rank)
        if rank == 0:
            await pg.send(turned, 1)
        else:
            assert await pg.recv(turned, 0) is turned
            assert host(tensor).ravel().tolist() == list(range(2 * LARGE))

    await run_with_gpus(2, body)


async def test_withdrawn_device_receive_does_not_delay_its_batch() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        if rank == 0:
            kept, withdrawn = filled(gpu, 0, -1), filled(gpu, 0, -1)
            batch = asyncio.ensure_future(pg.batch([Recv(kept, 1), Recv(withdrawn, 1, tag=1)], timeout=0.05).join())
            with pytest.raises(CollectiveTimeoutError, match="received no message with tag 1 from rank 1"):
                await batch
            assert has_value(kept, 7)
            await pg.send(filled(gpu, 0, 8), 1)
        else:
            await pg.send(filled(gpu, 1, 7), 0)
            assert has_value(await pg.recv(filled(gpu, 1, -1), 0), 8)

    await run_with_gpus(2, body)


async def test_nccl_message_of_another_length_is_reported_as_a_mismatch() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        tensor = filled(gpu, rank, 0, LARGE + rank)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        error = await pg.wait_revoked()
        assert isinstance(error, CollectiveMismatchError)
        assert re.search(rf"shape=\[{LARGE}\].*shape=\[{LARGE + 1}\]", str(error))
        await asyncio.wait([work.get_future()])

    await run_with_gpus(2, body)


async def test_timeout_error_of_an_unreceived_send_names_the_receiver() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await create_communicator(pg, gpu)
        if pg.rank() == 0:
            work = pg.send(filled(gpu, 0, 0), 1, timeout=0.05)
            with pytest.raises(CollectiveTimeoutError, match=r"SEND of group .* within 0.05 s on rank 0, .*rank 1"):
                await work
        await pg.wait_revoked()

    await run_with_gpus(2, body)


async def test_timeout_error_of_a_short_message_names_the_busy_device() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            gate = gpu.gate(0)
            work = pg.send(filled(gpu, 0, 0, 1), 1, timeout=0.05)
            with pytest.raises(CollectiveTimeoutError, match=r"which called SEND\(.*\): device 0 has not finished it"):
                await work
            gate.open()
        await pg.wait_revoked()

    await run_with_gpus(2, body)


async def test_timeout_error_of_an_nccl_message_names_rank_0_if_it_does_not_start_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BatchMatching, "matched", lambda *_: None)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        tensor = filled(gpu, rank, 0)
        if rank:
            other = pg.recv(filled(gpu, 1, 0), 0, tag=1)
            assert [each.describe_wait() for each in comm_of(pg).in_flight.pending] == [
                "no message with tag 1 has arrived from rank 0"
            ]
        work = pg.recv(tensor, 0, timeout=0.05) if rank else pg.send(tensor, 1)
        error = await pg.wait_revoked()
        if rank:
            assert isinstance(other.exception(), CollectiveTimeoutError)
        assert re.search(r"RECV of group .* on rank 1, .*: rank 0 has not started it", str(error))
        with pytest.raises(CollectiveTimeoutError):
            await work

    await run_with_gpus(2, body)


@pytest.mark.parametrize("stuck", [0, 1])
async def test_timeout_error_of_an_nccl_message_names_a_slow_device(stuck: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        gate = gpu.gate(rank) if rank == stuck else None
        tensor = filled(gpu, rank, 0)
        work = pg.recv(tensor, 0, timeout=0.1) if rank else pg.send(tensor, 1, timeout=0.1)
        error = await pg.wait_revoked()
        assert isinstance(error, CollectiveTimeoutError)
        what = r"(SEND|RECV) of group .* on rank [01], which called .*: both of its ranks have made this call, "
        assert re.search(
            what + "but device [01] has not finished it, or earlier work on the caller's stream", str(error)
        )
        if gate is not None:
            gate.open()
        with pytest.raises(GroupError):
            await work

    await run_with_gpus(2, body)


@pytest.mark.parametrize("call", ["send", "recv", "group_end"])
async def test_failed_nccl_message_fails_the_group(call: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        await pg.barrier()
        if rank == 0:
            gpu.nccl.fail_next(call)
        await pg.barrier()
        tensor = filled(gpu, rank, 0)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        error = await pg.wait_revoked()
        assert re.match(
            rf"(SEND|RECV) of group .* failed on rank [01], device [01]: {call}: internal error", str(error)
        )
        with pytest.raises(GroupError):
            await work

    await run_with_gpus(2, body)


@pytest.mark.parametrize("count", [LARGE, SMALL, 0])
async def test_on_stream_orders_later_work_after_a_received_message(count: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        stream, other = gpu.stream(rank), gpu.cuda.stream_create()
        gate = gpu.gate(rank)
        tensor, copy = filled(gpu, rank, 1 - rank, count), filled(gpu, rank, -1, count)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        if rank and count == SMALL:
            # Open the gate now: a staged message must arrive before `on_stream` returns.
            gate.open()
        assert await work.on_stream(other) is tensor
        assert not count or (rank and count == SMALL) or not work.done()
        gpu.cuda.kernel(other, lambda: np.copyto(host(copy), host(tensor)), rank)
        gate.open()
        await work
        gpu.cuda.stream_synchronize(other)
        assert has_value(copy, 1)
        assert stream != other

    await run_with_gpus(2, body)


@pytest.mark.parametrize("when", ["before", "matched"])
async def test_other_ranks_can_exchange_device_messages_after_rank_0_has_left(when: str, limits: Limits) -> None:
    limits(device_batch_wait=1e6, device_departure_timeout=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        if rank == 0:
            if when == "matched":
                await wait_until(lambda: dispatcher_of(pg).device_calls is not None and bool(matched_units(pg)))
            await pg.shutdown()
            return
        if when == "before":
            await wait_until(lambda: 0 in comm_of(pg).left)
        other = 3 - rank
        # The batch of rank 1 stays incomplete until rank 0 has left.
        tensors = [filled(gpu, rank, 2 * rank + index) for index in range(2)]
        into = [filled(gpu, rank, -1) for _ in range(2)]
        if rank == 1:
            work = pg.batch([Send(tensors[0], other), Send(tensors[1], other, tag=1)])
        else:
            first = pg.recv(into[0], other)
            if when == "matched":
                await wait_until(lambda: 0 in comm_of(pg).left)
            await first
            work = pg.recv(into[1], other, tag=1)
        await work
        if rank == 2:
            assert has_value(into[0], 2)
            assert has_value(into[1], 3)

    await run_with_gpus(3, body)


async def test_rank_that_leaves_during_an_nccl_message_fails_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        gate = gpu.gate(1) if rank == 1 else None
        tensor = filled(gpu, rank, 0)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        if gate is not None:
            await wait_until(lambda: any(each.is_waiting_for_device() for each in comm_of(pg).in_flight.pending))
            pg.timeout = 0.01
            asyncio.get_running_loop().call_later(0.1, gate.open)
            await pg.shutdown()
            with pytest.raises(GroupError, match="was closed by this rank"):
                await work
            return
        with pytest.raises(PeerLostError, match="rank 1"):
            await work
        assert await pg.wait_revoked() is not None

    await run_with_gpus(2, body)


async def test_device_messages_are_staged_after_a_rank_has_left(limits: Limits) -> None:
    """Include messages that are matched but not started. They cannot use NCCL, which needs all ranks."""
    limits(device_batch_wait=1e6, device_departure_timeout=0.05)
    held = asyncio.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        if rank == 0:
            await wait_until(lambda: len(matched_units(pg)) == 2)
            counted.clear()
            held.set()
            await wait_until(lambda: 3 in comm_of(pg).left)
            for unit in list(matched_units(pg).values()):
                matching_of(pg)._stop_waiting(unit)
            assert has_value(await pg.recv(filled(gpu, 0, -1), 1), 5)
        elif rank == 1:
            work = pg.batch([Send(filled(gpu, 1, 3), 2), Send(filled(gpu, 1, 4), 3, tag=1), Send(filled(gpu, 1, 5), 0)])
            with pytest.raises(PeerLostError, match="needs rank 3, which has left"):
                await work
        elif rank == 2:
            into = [filled(gpu, 2, -1), filled(gpu, 2, -1)]
            works = [pg.batch([Recv(into[0], 1), Recv(into[1], 3, tag=2)])]
            with pytest.raises(PeerLostError, match="needs rank 3, which has left"):
                await works[0]
            assert has_value(into[0], 3)
        else:
            work = pg.recv(filled(gpu, 3, -1), 1, tag=1)
            await held.wait()
            pg.timeout = 0.01
            await pg.shutdown()
            assert isinstance(work.exception(), GroupError)

    with gpus(4) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(4, body, gpu)
        assert not counted["send"] + counted["recv"]
        assert counted["pinned"]


@pytest.mark.parametrize("end", ["abort", "shutdown"])
async def test_matched_nccl_messages_of_a_failed_batch_do_not_start(end: str, limits: Limits) -> None:
    limits(device_batch_wait=1e6, device_departure_timeout=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        await clear_counts(pg, counted)
        tensors = [filled(gpu, rank, 0) for _ in range(2)]
        if rank == 1:
            batch = pg.batch([Send(tensors[0], 0), Recv(tensors[1], 0, tag=1)])
            await pg.recv_object(0)
            if end == "shutdown":
                pg.timeout = 0.01
                await pg.shutdown()
            await asyncio.gather(batch, return_exceptions=True)
        else:
            work = pg.recv(tensors[0], 1)
            await wait_until(lambda: matched_units(pg))
            await pg.send_object(None, 1)
            if end == "abort":
                pg.abort("enough")
                with pytest.raises(GroupError, match="enough"):
                    await work
            else:
                with pytest.raises(PeerLostError, match="needs rank 1, which has left"):
                    await work
                assert comm_of(pg).cause is None
        if end == "abort":
            await pg.wait_revoked()

    with gpus(2) as gpu:
        counted = count_nccl_calls(gpu)
        await run_ranks(2, body, gpu)
        assert not counted["send"] + counted["recv"]


@pytest.mark.parametrize("captured", ["send", "recv"])
async def test_other_messages_of_a_block_do_not_wait_for_a_refused_message(captured: str, limits: Limits) -> None:
    limits(device_batch_wait=1e6)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        await pg.barrier()
        tensor = filled(gpu, rank, 0)
        if rank == 0:
            await pg.recv(tensor, 1)
        else:
            stream = gpu.stream(rank)
            with contextlib.suppress(RuntimeError):
                async with pg.coalescing():
                    lost = filled(gpu, rank, 0)
                    work = pg.send(lost, 0, tag=1) if captured == "send" else pg.recv(lost, 0, tag=1)
                    gpu.torch.streams.pop(rank)
                    pg.send(tensor, 0)
                    gpu.cuda.capture(stream, True, rank)
            gpu.cuda.capture(stream, False, rank)
            assert isinstance(work.exception(), RuntimeError)

    await run_with_gpus(2, body)


async def test_start_notice_for_unknown_nccl_messages_is_ignored() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await create_communicator(pg, gpu)
        assert dispatcher_of(pg).device_calls is not None
        if rank == 0:
            dispatcher_of(pg).device_calls.state.messages._number([matching.Match(1, 2, 999)], False)
        await pg.barrier()
        tensor = filled(gpu, rank, rank)
        if rank:
            await (pg.send(tensor, 2) if rank == 1 else pg.recv(tensor, 1))
            assert has_value(tensor, 1)
        await pg.allreduce(tensor)
        assert has_value(tensor, 2)

    await run_with_gpus(3, body)


async def test_subgroup_with_another_rank_order_exchanges_nccl_messages() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        part = await pg.split_group([[2, 0]])
        if part is None:
            return
        device = pg.rank()
        await part.allreduce(gpu.tensor(np.ones(2), device))
        rank = part.rank()
        sent, into = filled(gpu, device, rank), filled(gpu, device, -1)
        await part.batch([Send(sent, 1 - rank), Recv(into, 1 - rank)])
        assert has_value(into, 1 - rank)

    await run_with_gpus(3, body)


@pytest.mark.parametrize("seed", range(6))
async def test_random_sequences_of_device_messages_give_correct_results(seed: int) -> None:
    """Send random messages in random batches, with some collectives between them."""
    world_size, rounds = 4, 12
    choose = random.Random(seed)
    program = []
    for number in range(rounds):
        ends = [tuple(choose.sample(range(world_size), 2)) for _ in range(choose.randrange(1, 8))]
        sizes = [choose.choice((1, LARGE, LARGE + 3)) for _ in ends]
        cuts = {rank: choose.randrange(1, 4) for rank in range(world_size)}
        program.append((number, ends, sizes, cuts, choose.random() < 0.5))

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        own_random = random.Random(seed * 100 + rank)
        await create_communicator(pg, gpu)
        for number, ends, sizes, cuts, sums in program:
            operations: list[Send | Recv] = []
            expected = []
            for tag, ((src, dst), count) in enumerate(zip(ends, sizes, strict=True)):
                if src == rank:
                    operations.append(Send(filled(gpu, rank, number + tag, count), dst, tag))
                elif dst == rank:
                    operations.append(Recv(tensor := filled(gpu, rank, -1, count), src, tag))
                    expected.append((tensor, number + tag))
            own_random.shuffle(operations)
            works: list[Any] = [
                pg.batch(operations[part :: cuts[rank]]) for part in range(cuts[rank]) if operations[part :: cuts[rank]]
            ]
            summed = filled(gpu, rank, rank)
            if sums:
                works.insert(own_random.randrange(len(works) + 1), pg.allreduce(summed))
            await asyncio.gather(*(work.join() for work in works))
            assert all(has_value(tensor, value) for tensor, value in expected)
            assert not sums or has_value(summed, 6)

    await run_with_gpus(world_size, body)


@pytest.mark.parametrize("transport", LINKS)
async def test_ranks_without_a_link_to_rank_0_exchange_nccl_messages(transport: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        short = filled(gpu, rank, 0, 1)
        # Exchange messages only between neighbours, since a collective would open a link to rank 0.
        if rank:
            await pg.recv(short, rank - 1)
        if rank < 2:
            await pg.send(short, rank + 1)
        await wait_until(lambda: uses_nccl(pg))
        long = filled(gpu, rank, rank)
        if rank:
            await (pg.send(long, 2) if rank == 1 else pg.recv(long, 1))
            assert has_value(long, 1)

    await run_with_gpus(3, body, transport=transport)
