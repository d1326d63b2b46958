"""Stream order of device work before and after a call, and lifetime of array memory during calls."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiocoll import ProcessGroup

from ...ranks import run_ranks
from ..groups import WAYS
from .base import reduced_and_gated
from .worlds import SIMULATED, World, possible_ranks, world

both = pytest.mark.parametrize("way", WAYS)


@both
async def test_call_runs_after_a_long_kernel_that_is_already_on_the_callers_stream(kind: str, way: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> None:
        device = pg.rank() % made.devices
        tensor = made.tensor(np.zeros(1000), device)
        made.delay(made.slow / 3, device)
        made.add(tensor, pg.rank() + 1.0)
        await pg.allreduce(tensor)
        made.add(tensor, 10.0)
        assert set(made.host(tensor)) == {pg.size() * (pg.size() + 1) / 2 + 10}

    with world(kind, way, 2) as made:
        for device in range(made.devices):
            made.stream(device)
        await run_ranks(possible_ranks(made, way, 2), body, made)


async def test_on_stream_makes_the_current_stream_wait_for_the_call_without_blocking_the_host(kind: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> None:
        _, tensor, gate = await reduced_and_gated(pg, made, 0.0)
        made.add(tensor, pg.rank() + 1.0)
        work = pg.allreduce(tensor)
        assert await work.on_stream() is tensor
        made.add(tensor, 10.0)
        again = pg.allreduce(tensor)
        await again.on_stream()
        assert not work.done()
        assert not again.done()
        gate.open()
        await again
        total = pg.size() * (pg.size() + 1) / 2
        assert set(made.host(tensor)) == {pg.size() * (total + 10)}

    with world(kind, "nccl", 2) as made:
        for device in range(made.devices):
            made.stream(device)
        await run_ranks(possible_ranks(made, "nccl", 2), body, made)


async def test_on_stream_makes_a_given_stream_wait_for_the_call(kind: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> None:
        device, tensor, gate = await reduced_and_gated(pg, made)
        work = pg.allreduce(tensor)
        other = made.stream(device)
        await work.on_stream(other)
        made.add(tensor, 1.0)
        gate.open()
        await work
        assert set(made.host(tensor)) == {pg.size() ** 2 + 1}

    with world(kind, "nccl", 2) as made:
        for device in range(made.devices):
            made.stream(device)
        await run_ranks(possible_ranks(made, "nccl", 2), body, made)


@both
@pytest.mark.parametrize("per_thread", [False, True])
async def test_device_calls_keep_their_order_with_work_on_default_streams(
    kind: str, way: str, per_thread: bool
) -> None:
    if kind in ("torch", "simulated") and per_thread:
        pytest.skip("torch does not use the default streams of threads")

    async def body(pg: ProcessGroup, made: World) -> None:
        _, tensor, gate = await reduced_and_gated(pg, made, 0.0)
        made.add(tensor, pg.rank() + 1.0)
        work = pg.allreduce(tensor)
        await pg.barrier()
        assert not work.done()
        gate.open()
        await work.on_stream()
        made.add(tensor, 10.0)
        await work  # await now, since the next line blocks the loop, which all ranks share
        assert set(made.host(tensor)) == {pg.size() * (pg.size() + 1) / 2 + 10}

    with world(kind, way, 2) as made:
        for device in range(made.devices):
            made.default_stream(device, per_thread)
        await run_ranks(possible_ranks(made, way, 2), body, made)


@both
async def test_stream_capture_stays_valid_and_contains_no_collective_call(kind: str, way: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> None:
        device, tensor, gate = await reduced_and_gated(pg, made)
        work = pg.allreduce(tensor)
        await pg.barrier()
        made.stream(device)
        with made.capturing(device):
            with pytest.raises(RuntimeError, match="being captured into a graph"):
                pg.allreduce(tensor)
            gate.open()
            await work  # device threads query the end of this work during the capture
        await pg.allreduce(tensor)
        assert set(made.host(tensor)) == {pg.size() ** 3}

    with world(kind, way, 1) as made:
        made.stream(0)
        await run_ranks(1, body, made)


@both
async def test_array_memory_is_not_reused_while_calls_read_the_array(kind: str, way: str) -> None:
    turns, together, count = (32 if kind in SIMULATED else 2000), 8, 5000

    async def body(pg: ProcessGroup, made: World) -> None:
        rank, size, device = pg.rank(), pg.size(), pg.rank() % made.devices
        for start in range(0, turns, together):
            outputs = [made.tensor(np.zeros(size * count), device) for _ in range(together)]
            works = []
            for turn, output in enumerate(outputs, start):
                # If calls held no reference to their source, which is deleted here, a new array could get its memory.
                source = made.tensor(np.full(count, turn * size + rank, float), device)
                works.append(pg.allgather_into_tensor(output, source))
                del source
                junk = [made.tensor(np.full(count, -1.0), device) for _ in range(3)]
            for work in works:
                await work
            assert all((made.host(each) == -1).all() for each in junk)
            for turn, output in enumerate(outputs, start):
                found = made.host(output).reshape(size, count)
                assert (found == turn * size + np.arange(size)[:, None]).all()

    with world(kind, way, 2) as made:
        await run_ranks(possible_ranks(made, way, 2), body, made)


@both
async def test_arrays_can_be_deleted_while_their_calls_are_in_flight(kind: str, way: str) -> None:
    turns = 30 if kind in SIMULATED else 500

    async def body(pg: ProcessGroup, made: World) -> None:
        device = pg.rank() % made.devices
        for turn in range(turns):
            tensor = made.tensor(np.full(5000, turn + pg.rank()), device)
            work = pg.allreduce(tensor)
            del tensor
            junk = [
                made.tensor(np.full(5000, -1), device) for _ in range(3)
            ]  # these arrays could get the memory of the deleted array if it were freed
            await asyncio.sleep(0)
            found = made.host(await work)
            assert set(found) == {pg.size() * turn + pg.size() * (pg.size() - 1) // 2}
            assert all((made.host(each) == -1).all() for each in junk)

    with world(kind, way, 2) as made:
        await run_ranks(possible_ranks(made, way, 2), body, made)
