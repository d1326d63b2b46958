"""Processes that share one device: staged calls, and NCCL if its version allows two ranks on one device."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from aiocoll import AiocollError, GroupRevokedError, PeerLostError, ProcessGroup, Recv, ReduceOp, Send, testing
from aiocoll.gpu.provider import provide, runtime

from ...internals import dispatcher_of
from ...ranks import run_ranks
from .two import PosingCuda, rank_settings, way_for_version
from .worlds import SIMULATED, World, world

#: The timeout of the test processes in seconds: shorter than the time limit of the step, so that the test itself can
#: show the stacks of hung processes.
LIMIT = 45.0


async def make_checked_calls(pg: ProcessGroup, made: World) -> str:
    """Make calls of all kinds and compare the results with NumPy; return "nccl" or "staged"."""
    rank, size, device = pg.rank(), pg.size(), pg.rank() % made.devices
    for count in (0, 1, 1000, 300_000):
        values = [np.arange(count) * 1.0 + each for each in range(size)]
        tensor = made.tensor(values[rank], device)
        await pg.allreduce(tensor)
        assert np.array_equal(made.host(tensor), sum(values))
        await pg.broadcast(tensor, size - 1)
        await pg.reduce(tensor, 0, ReduceOp.MAX)
        assert np.array_equal(made.host(tensor), sum(values))
    parts = [made.tensor(np.full(3, rank * size + peer), device) for peer in range(size)]
    into = [made.tensor(np.zeros(3, int), device) for _ in range(size)]
    await pg.alltoall(into, parts)
    assert [made.host(each)[0] for each in into] == [peer * size + rank for peer in range(size)]
    await pg.allgather(into, parts[0])
    assert [made.host(each)[0] for each in into] == [peer * size for peer in range(size)]
    one, two = made.tensor(np.full(3, rank + 1.0), device), made.tensor(np.full(3, rank), device)
    async with pg.coalescing():
        pg.allreduce(one)
        pg.broadcast(two, size - 1)
    assert made.host(one).tolist() == [size * (size + 1) / 2] * 3
    assert made.host(two).tolist() == [size - 1] * 3
    if size > 1:  # a rank cannot send to itself
        right, left = (rank + 1) % size, (rank - 1) % size
        sent = pg.send(made.tensor(np.full(100_000, rank), device), right, tag=2)
        tensor = made.tensor(np.zeros(100_000, int), device)
        await pg.recv(tensor, left, tag=2)
        assert (made.host(tensor) == left).all()
        await sent
        into = made.tensor(np.zeros(100_000, int), device)
        await pg.batch([Send(tensor, right), Recv(into, left)])
        assert (made.host(into) == (left - 1) % size).all()
    assert dispatcher_of(pg).device_calls is not None
    assert dispatcher_of(pg).device_calls.state.decision is not None
    return "nccl" if dispatcher_of(pg).device_calls.state.decision.native else "staged"


async def call_staged(pg: ProcessGroup, kind: str) -> str:
    with world(kind) as made:
        found = await make_checked_calls(pg, made)
        tensor = made.tensor(np.ones(4 << 20))
        start = perf_counter()
        for _ in range(3):
            await pg.allreduce(tensor)
        if pg.rank() == 0:
            ms = round((perf_counter() - start) / 3 * 1e3, 2)
            made.figure(f"staged allreduce of 32 MiB, {pg.size()} processes: ms", ms)
        await pg.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
async def test_calls_of_processes_on_one_device_are_staged(kind: str, world_size: int) -> None:
    if kind in SIMULATED and world_size > 2:
        pytest.skip("two processes are enough on simulated devices")
    assert await testing.run_processes(world_size, call_staged, kind, timeout=LIMIT) == ["staged"] * world_size


async def kill_rank_1(pg: ProcessGroup, kind: str, reports: Path) -> None:
    with world(kind) as made:
        await pg.allreduce(made.tensor(np.ones(3)))
        if pg.rank() == 1:
            await pg.recv_object(0)
            os.kill(os.getpid(), signal.SIGKILL)
        await pg.send_object("ready", 1)
        error = await pg.wait_revoked()
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        with pytest.raises(GroupRevokedError, match="rank 1"):
            pg.allreduce(made.tensor(np.ones(3)))
        (reports / str(pg.rank())).touch()
        with contextlib.suppress(AiocollError):
            await pg.shutdown()


async def test_process_that_dies_is_reported(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="rank 1"):
        await testing.run_processes(2, kill_rank_1, kind, tmp_path, timeout=LIMIT)
    assert os.listdir(tmp_path) == ["0"]


async def call_on_shared_device(pg: ProcessGroup, kind: str) -> str:
    cuda, nccl = runtime()
    assert nccl is not None
    os.environ.update(rank_settings(pg.rank(), way_for_version(nccl.version())))
    with world(kind, stuck=True) as made:  # `stuck`, since NCCL may refuse two ranks on a device, or hang
        pg.timeout = 20.0
        with provide(PosingCuda(cuda, pg.rank()), nccl):  # type: ignore[arg-type]
            found = await make_checked_calls(pg, made)
            await pg.shutdown()
    return found


@pytest.mark.gpu
async def test_two_processes_on_one_device_can_reduce_by_nccl(kind: str) -> None:
    if kind in SIMULATED:
        pytest.skip("the ranks of the simulated NCCL share a process: see the next test")
    assert await testing.run_processes(2, call_on_shared_device, kind, timeout=LIMIT) == ["nccl"] * 2


async def test_ranks_of_one_process_reduce_by_nccl(kind: str) -> None:
    with world(kind, "nccl", 2) as made:
        assert set(await run_ranks(min(2, made.devices), make_checked_calls, made)) == {"nccl"}
