"""Messages of CUDA arrays in groups that use NCCL: what is longer than the window of unasked bytes goes by it."""

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

from ..internals import Limits, comm_of, dispatcher_of, matched_units, matching_of, replaced
from ..ranks import LINKS, run_ranks, until
from ..reductions import WIDE
from .groups import Gpus, allreduced, gpus, host, is_native

#: Elements of 8 bytes that go by NCCL, and the most that do not.
LARGE, SMALL = EAGER_WINDOW // 8 + 1, EAGER_WINDOW // 8


def counts(gpu: Gpus) -> Counter[str]:
    """Count calls of NCCL and of page-locked memory from now on, on all ranks."""
    counted: Counter[str] = Counter()
    gpu.nccl.hooks.append(lambda call: counted.update([call]))
    gpu.cuda.hooks.append(lambda call: counted.update([call] * (call == "pinned")))
    return counted


async def begun(pg: ProcessGroup, gpu: Gpus) -> None:
    """Make the communicator."""
    await allreduced(pg, gpu)


def full(gpu: Gpus, rank: int, value: float, count: int = LARGE) -> Any:
    return gpu.tensor(np.full(count, value), rank)


def holds(tensor: Any, value: float) -> bool:
    return bool((host(tensor) == value).all())


@pytest.mark.parametrize("transport", LINKS)
async def test_long_messages_go_by_nccl_and_short_ones_do_not_wait(transport: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        await pg.barrier()
        if rank == 0:
            counted.clear()
        await pg.barrier()
        if rank == 0:
            assert await pg.send(short := full(gpu, 0, 1, SMALL), 1) is short
            await pg.barrier()
            assert await pg.send(long := full(gpu, 0, 2), 1, tag=9) is long
        else:
            await pg.barrier()
            assert holds(await pg.recv(full(gpu, 1, 0, SMALL), 0), 1)
            assert counted["send"] == counted["recv"] == 0
            counted.clear()
            work = pg.recv(tensor := full(gpu, 1, 0), 0, tag=9)
            assert await work is tensor
            assert work.source_rank() == 0
            assert holds(tensor, 2)
            assert counted == {"send": 1, "recv": 1, "group_start": 2, "group_end": 2}

    with gpus(2) as gpu:
        counted = counts(gpu)
        await run_ranks(2, body, gpu, transport=transport)


async def test_every_dtype_goes_without_a_copy() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
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
        counted = counts(gpu)
        await run_ranks(2, body, gpu)
        assert counted["send"] == counted["recv"] == len(WIDE)
        assert not counted["pinned"]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
async def test_a_ring_in_a_batch_is_one_group_of_calls(world_size: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        await begun(pg, gpu)
        await pg.barrier()
        if rank == 0:
            counted.clear()
        await pg.barrier()
        for turn in range(3):
            sent, received = full(gpu, rank, rank + turn), full(gpu, rank, -1)
            result = await pg.batch([Recv(received, (rank - 1) % size), Send(sent, (rank + 1) % size)])
            assert result == [received, sent]
            assert holds(received, (rank - 1) % size + turn)

    with gpus(world_size) as gpu:
        counted = counts(gpu)
        await run_ranks(world_size, body, gpu)
        each = 3 * world_size
        assert counted == {"send": each, "recv": each, "group_start": each, "group_end": each, "destroy": world_size}


async def test_the_messages_of_a_block_are_one_group_of_calls() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        await begun(pg, gpu)
        await pg.barrier()
        if rank == 0:
            counted.clear()
        await pg.barrier()
        into = {peer: full(gpu, rank, -1) for peer in range(size) if peer != rank}
        short = full(gpu, rank, -1, 3)
        async with pg.coalescing():
            for peer, tensor in into.items():
                pg.recv(tensor, peer)
            for peer in into:
                pg.send(full(gpu, rank, rank), peer)
            pg.send(full(gpu, rank, rank, 3), (rank + 1) % size, tag=1)
            pg.recv(short, (rank - 1) % size, tag=1)
            summed = pg.allreduce(full(gpu, rank, 1))
        assert holds(short, (rank - 1) % size)
        assert holds(await summed, size)
        assert all(holds(tensor, peer) for peer, tensor in into.items())

    with gpus(3) as gpu:
        counted = counts(gpu)
        await run_ranks(3, body, gpu)
        assert (counted["send"], counted["recv"], counted["all_reduce"]) == (6, 6, 3)
        assert counted["group_start"] == counted["group_end"] == 3


async def test_both_ends_first_send_and_then_receive() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        for _ in range(5):
            sent = [pg.send(full(gpu, rank, rank), peer) for peer in range(pg.size()) if peer != rank]
            into = {peer: full(gpu, rank, -1) for peer in range(pg.size()) if peer != rank}
            received = [pg.recv(tensor, peer) for peer, tensor in into.items()]
            await asyncio.gather(*(work.join() for work in [*received, *sent]))
            assert all(holds(tensor, peer) for peer, tensor in into.items())

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


async def test_messages_and_collectives_in_another_order_on_each_rank() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        for turn in range(10):
            summed, tensor = full(gpu, rank, rank), full(gpu, rank, turn if rank == 0 else -1)
            message = [lambda t=tensor: pg.recv(t, 0) if rank else pg.send(t, 1)]
            calls = [lambda s=summed: pg.allreduce(s, key="sum"), *(message if rank < 2 else [])]
            works = [call() for call in (calls if (rank + turn) % 2 else calls[::-1])]
            await asyncio.gather(*(work.join() for work in works))
            assert holds(summed, 3)
            assert rank == 2 or holds(tensor, turn)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


async def test_a_batch_that_others_wait_for_begins_in_parts() -> None:
    """Rank 2 receives from rank 0 only after it has received from rank 1, which waits for rank 0's batch."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        if rank == 0:
            await pg.batch([Send(full(gpu, 0, 1), 1), Send(full(gpu, 0, 2), 2)])
        elif rank == 1:
            tensor = full(gpu, 1, -1)
            await pg.recv(tensor, 0)
            await pg.send(tensor, 2)
        else:
            assert holds(await pg.recv(full(gpu, 2, -1), 1), 1)
            assert holds(await pg.recv(full(gpu, 2, -1), 0), 2)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


@pytest.mark.parametrize("sender", ["device", "host"])
async def test_the_other_end_may_be_on_the_host(sender: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        await pg.barrier()
        if rank == 0:
            counted.clear()
        await pg.barrier()
        for _ in range(2):
            on_device = (rank == 0) == (sender == "device")
            array = np.full(LARGE, 3.0 if rank == 0 else 0.0)
            tensor = gpu.tensor(array, rank) if on_device else array
            # In a batch with one that goes by NCCL, which is not held up by it.
            other = full(gpu, rank, 4 if rank == 0 else 0)
            if rank == 0:
                await pg.batch([Send(tensor, 1), Send(other, 1, tag=1)])
            else:
                work = pg.batch([Recv(tensor, None), Recv(other, 0, tag=1)])
                await work
                assert (array == 3).all() if sender == "device" else holds(tensor, 3)
                assert holds(other, 4)

    with gpus(2) as gpu:
        counted = counts(gpu)
        await run_ranks(2, body, gpu)
        assert counted["send"] == counted["recv"] == 2


async def test_a_message_that_nobody_asks_for_is_taken_by_incoming() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await begun(pg, gpu)
        if pg.rank() == 0:
            await pg.send(full(gpu, 0, 5), 1, tag=3)
        else:
            source, array = await anext(pg.incoming(3))
            assert (source, array.tolist()) == (0, [5.0] * LARGE)

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_what_incoming_has_asked_for_comes_from_the_host() -> None:
    """A message that an iterator has asked for, and that a receive takes then."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await begun(pg, gpu)
        await pg.barrier()
        if pg.rank() == 0:
            counted.clear()
            await pg.send(full(gpu, 0, 5), 1, tag=3)
        else:
            await until(lambda: comm_of(pg).matching._waiting)
            step = asyncio.ensure_future(anext(pg.incoming(3)))
            await asyncio.sleep(0)
            step.cancel()
            assert holds(await pg.recv(full(gpu, 1, 0), 0, tag=3), 5)
        await pg.barrier()
        assert not counted["send"] + counted["recv"]

    with gpus(2) as gpu:
        counted = counts(gpu)
        await run_ranks(2, body, gpu)


async def test_from_any_rank_and_in_the_order_sent() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        counts = (LARGE, SMALL, LARGE + 1, 1)
        if rank:
            works = [pg.send(full(gpu, rank, 10 * rank + index, count), 0) for index, count in enumerate(counts)]
            await asyncio.gather(*(work.join() for work in works))
        else:
            last = {1: 0, 2: 0}
            for source in (1, 2):
                for index, count in enumerate(counts):
                    assert holds(await pg.recv(full(gpu, 0, -1, count), source), 10 * source + index)
            await pg.barrier()
            for _ in range(4):
                work = pg.recv_anysource(tensor := full(gpu, 0, -1))
                await work
                source = work.source_rank()
                assert holds(tensor, 100 * source + last[source])
                last[source] += 1
        if rank:
            await pg.barrier()
            for index in range(2):
                await pg.send(full(gpu, rank, 100 * rank + index), 0)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


async def test_an_array_with_gaps_is_filled_where_its_elements_lie() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        tensor = gpu.tensor(np.arange(2.0 * LARGE).reshape(LARGE, 2) * (1 - rank), rank)
        turned = gpu.torch.Tensor(tensor.values.T, "float64", rank)
        turned.contiguous = lambda: gpu.tensor(tensor.values.T, rank)
        if rank == 0:
            await pg.send(turned, 1)
        else:
            assert await pg.recv(turned, 0) is turned
            assert host(tensor).ravel().tolist() == list(range(2 * LARGE))

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_a_receive_that_was_taken_back_is_not_waited_for() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        if rank == 0:
            patient, gone = full(gpu, 0, -1), full(gpu, 0, -1)
            batch = asyncio.ensure_future(pg.batch([Recv(patient, 1), Recv(gone, 1, tag=1)], timeout=0.05).join())
            with pytest.raises(CollectiveTimeoutError, match="received no message with tag 1 from rank 1"):
                await batch
            assert holds(patient, 7)
            await pg.send(full(gpu, 0, 8), 1)
        else:
            await pg.send(full(gpu, 1, 7), 0)
            assert holds(await pg.recv(full(gpu, 1, -1), 0), 8)

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_another_length_is_told() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        tensor = full(gpu, rank, 0, LARGE + rank)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        error = await pg.wait_revoked()
        assert isinstance(error, CollectiveMismatchError)
        assert re.search(rf"shape=\[{LARGE}\].*shape=\[{LARGE + 1}\]", str(error))
        await asyncio.wait([work.get_future()])

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_a_send_that_nobody_receives_says_whom_it_waits_for() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await begun(pg, gpu)
        if pg.rank() == 0:
            work = pg.send(full(gpu, 0, 0), 1, timeout=0.05)
            with pytest.raises(CollectiveTimeoutError, match=r"SEND of group .* within 0.05 s on rank 0, .*rank 1"):
                await work
        await pg.wait_revoked()

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_a_short_message_that_its_device_holds_up_says_so() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        if pg.rank() == 0:
            gate = gpu.gate(0)
            work = pg.send(full(gpu, 0, 0, 1), 1, timeout=0.05)
            with pytest.raises(CollectiveTimeoutError, match=r"which called SEND\(.*\): device 0 has not finished it"):
                await work
            gate.open()
        await pg.wait_revoked()

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_rank_0_is_named_if_it_does_not_let_a_message_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, device_matched=lambda *_: None)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        tensor = full(gpu, rank, 0)
        if rank:
            other = pg.recv(full(gpu, 1, 0), 0, tag=1)
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

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("stuck", [0, 1])
async def test_a_device_that_is_not_done_in_time_is_named(stuck: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        gate = gpu.gate(rank) if rank == stuck else None
        tensor = full(gpu, rank, 0)
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

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("call", ["send", "recv", "group_end"])
async def test_a_call_that_fails_ends_the_group(call: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        await pg.barrier()
        if rank == 0:
            gpu.nccl.fail_next(call)
        await pg.barrier()
        tensor = full(gpu, rank, 0)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        error = await pg.wait_revoked()
        assert re.match(
            rf"(SEND|RECV) of group .* failed on rank [01], device [01]: {call}: internal error", str(error)
        )
        with pytest.raises(GroupError):
            await work

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("count", [LARGE, SMALL, 0])
async def test_on_stream_orders_what_comes_after(count: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        stream, other = gpu.stream(rank), gpu.cuda.stream_create()
        gate = gpu.gate(rank)
        tensor, copy = full(gpu, rank, 1 - rank, count), full(gpu, rank, -1, count)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        if rank and count == SMALL:
            # What has gone through the host has to be there first.
            gate.open()
        assert await work.on_stream(other) is tensor
        assert not count or (rank and count == SMALL) or not work.done()
        gpu.cuda.kernel(other, lambda: np.copyto(host(copy), host(tensor)), rank)
        gate.open()
        await work
        gpu.cuda.stream_synchronize(other)
        assert holds(copy, 1)
        assert stream != other

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


@pytest.mark.parametrize("when", ["before", "matched"])
async def test_messages_go_on_without_rank_0(when: str, limits: Limits) -> None:
    limits(device_patience=1e6, device_parting=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        if rank == 0:
            if when == "matched":
                await until(lambda: dispatcher_of(pg).device_calls is not None and bool(matched_units(pg)))
            await pg.shutdown()
            return
        if when == "before":
            await until(lambda: 0 in comm_of(pg).left)
        other = 3 - rank
        # The batch of rank 1 is not complete while rank 0 is there.
        tensors = [full(gpu, rank, 2 * rank + index) for index in range(2)]
        into = [full(gpu, rank, -1) for _ in range(2)]
        if rank == 1:
            work = pg.batch([Send(tensors[0], other), Send(tensors[1], other, tag=1)])
        else:
            first = pg.recv(into[0], other)
            if when == "matched":
                await until(lambda: 0 in comm_of(pg).left)
            await first
            work = pg.recv(into[1], other, tag=1)
        await work
        if rank == 2:
            assert holds(into[0], 2)
            assert holds(into[1], 3)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


async def test_a_rank_that_leaves_while_a_message_flies_ends_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        gate = gpu.gate(1) if rank == 1 else None
        tensor = full(gpu, rank, 0)
        work = pg.recv(tensor, 0) if rank else pg.send(tensor, 1)
        if gate is not None:
            await until(lambda: any(each.is_waiting_for_device() for each in comm_of(pg).in_flight.pending))
            pg.timeout = 0.01
            asyncio.get_running_loop().call_later(0.1, gate.open)
            await pg.shutdown()
            with pytest.raises(GroupError, match="was closed by this rank"):
                await work
            return
        with pytest.raises(PeerLostError, match="rank 1"):
            await work
        assert await pg.wait_revoked() is not None

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_once_a_rank_has_left_messages_are_staged(limits: Limits) -> None:
    """NCCL needs all ranks of a communicator; so does what is matched and has not begun."""
    limits(device_patience=1e6, device_parting=0.05)
    held = asyncio.Event()

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        if rank == 0:
            await until(lambda: len(matched_units(pg)) == 2)
            counted.clear()
            held.set()
            await until(lambda: 3 in comm_of(pg).left)
            for unit in list(matched_units(pg).values()):
                matching_of(pg)._stop_waiting(unit)
            assert holds(await pg.recv(full(gpu, 0, -1), 1), 5)
        elif rank == 1:
            work = pg.batch([Send(full(gpu, 1, 3), 2), Send(full(gpu, 1, 4), 3, tag=1), Send(full(gpu, 1, 5), 0)])
            with pytest.raises(PeerLostError, match="needs rank 3, which has left"):
                await work
        elif rank == 2:
            into = [full(gpu, 2, -1), full(gpu, 2, -1)]
            works = [pg.batch([Recv(into[0], 1), Recv(into[1], 3, tag=2)])]
            with pytest.raises(PeerLostError, match="needs rank 3, which has left"):
                await works[0]
            assert holds(into[0], 3)
        else:
            work = pg.recv(full(gpu, 3, -1), 1, tag=1)
            await held.wait()
            pg.timeout = 0.01
            await pg.shutdown()
            assert isinstance(work.exception(), GroupError)

    with gpus(4) as gpu:
        counted = counts(gpu)
        await run_ranks(4, body, gpu)
        assert not counted["send"] + counted["recv"]
        assert counted["pinned"]


@pytest.mark.parametrize("end", ["abort", "shutdown"])
async def test_nothing_begins_because_the_rest_of_its_batch_has_failed(end: str, limits: Limits) -> None:
    limits(device_patience=1e6, device_parting=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        await pg.barrier()
        if rank == 0:
            counted.clear()
        await pg.barrier()
        tensors = [full(gpu, rank, 0) for _ in range(2)]
        if rank == 1:
            batch = pg.batch([Send(tensors[0], 0), Recv(tensors[1], 0, tag=1)])
            await pg.recv_object(0)
            if end == "shutdown":
                pg.timeout = 0.01
                await pg.shutdown()
            await asyncio.gather(batch, return_exceptions=True)
        else:
            work = pg.recv(tensors[0], 1)
            await until(lambda: matched_units(pg))
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
        counted = counts(gpu)
        await run_ranks(2, body, gpu)
        assert not counted["send"] + counted["recv"]


@pytest.mark.parametrize("captured", ["send", "recv"])
async def test_a_block_does_not_wait_for_a_message_that_could_not_start(captured: str, limits: Limits) -> None:
    limits(device_patience=1e6)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        await pg.barrier()
        tensor = full(gpu, rank, 0)
        if rank == 0:
            await pg.recv(tensor, 1)
        else:
            stream = gpu.stream(rank)
            with contextlib.suppress(RuntimeError):
                async with pg.coalescing():
                    lost = full(gpu, rank, 0)
                    work = pg.send(lost, 0, tag=1) if captured == "send" else pg.recv(lost, 0, tag=1)
                    gpu.torch.streams.pop(rank)
                    pg.send(tensor, 0)
                    gpu.cuda.capture(stream, True, rank)
            gpu.cuda.capture(stream, False, rank)
            assert isinstance(work.exception(), RuntimeError)

    with gpus(2) as gpu:
        await run_ranks(2, body, gpu)


async def test_ends_that_are_gone_do_not_begin() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await begun(pg, gpu)
        assert dispatcher_of(pg).device_calls is not None
        if rank == 0:
            dispatcher_of(pg).device_calls.state.messages._number([matching.Match(1, 2, 999)], False)
        await pg.barrier()
        tensor = full(gpu, rank, rank)
        if rank:
            await (pg.send(tensor, 2) if rank == 1 else pg.recv(tensor, 1))
            assert holds(tensor, 1)
        await pg.allreduce(tensor)
        assert holds(tensor, 2)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


async def test_a_group_of_some_of_the_ranks() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        part = await pg.split_group([[2, 0]])
        if part is None:
            return
        device = pg.rank()
        await part.allreduce(gpu.tensor(np.ones(2), device))
        rank = part.rank()
        sent, into = full(gpu, device, rank), full(gpu, device, -1)
        await part.batch([Send(sent, 1 - rank), Recv(into, 1 - rank)])
        assert holds(into, 1 - rank)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu)


@pytest.mark.parametrize("seed", range(6))
async def test_any_program_that_would_end_on_the_host_ends(seed: int) -> None:
    """Random messages in random batches, in tasks, with collectives between them: all ends, and is right."""
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
        mine = random.Random(seed * 100 + rank)
        await begun(pg, gpu)
        for number, ends, sizes, cuts, sums in program:
            operations: list[Send | Recv] = []
            expected = []
            for tag, ((src, dst), count) in enumerate(zip(ends, sizes, strict=True)):
                if src == rank:
                    operations.append(Send(full(gpu, rank, number + tag, count), dst, tag))
                elif dst == rank:
                    operations.append(Recv(tensor := full(gpu, rank, -1, count), src, tag))
                    expected.append((tensor, number + tag))
            mine.shuffle(operations)
            works: list[Any] = [
                pg.batch(operations[part :: cuts[rank]]) for part in range(cuts[rank]) if operations[part :: cuts[rank]]
            ]
            summed = full(gpu, rank, rank)
            if sums:
                works.insert(mine.randrange(len(works) + 1), pg.allreduce(summed))
            await asyncio.gather(*(work.join() for work in works))
            assert all(holds(tensor, value) for tensor, value in expected)
            assert not sums or holds(summed, 6)

    with gpus(world_size) as gpu:
        await run_ranks(world_size, body, gpu)


@pytest.mark.parametrize("transport", LINKS)
async def test_ranks_that_rank_0_has_no_link_to(transport: str) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        short = full(gpu, rank, 0, 1)
        # No collective: nothing but messages from rank to rank.
        if rank:
            await pg.recv(short, rank - 1)
        if rank < 2:
            await pg.send(short, rank + 1)
        await until(lambda: is_native(pg))
        long = full(gpu, rank, rank)
        if rank:
            await (pg.send(long, 2) if rank == 1 else pg.recv(long, 1))
            assert holds(long, 1)

    with gpus(3) as gpu:
        await run_ranks(3, body, gpu, transport=transport)
