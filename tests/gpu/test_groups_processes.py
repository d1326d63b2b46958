"""CUDA arrays of ranks in separate processes, each with its own fake device; all calls are staged."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from aiocoll import GroupOptions, PeerLostError, ProcessGroup, ReduceOp, testing

from ..internals import dispatcher_of
from .groups import Gpus, gpus, host


async def make_blocks(pg: ProcessGroup, gpu: Gpus) -> None:
    rank, size = pg.rank(), pg.size()
    tensors = [gpu.tensor(np.full(count, rank + 1), 0) for count in (0, 3, 100_000)]
    array, root = np.ones(4), gpu.tensor(np.full(2, rank), 0)
    async with pg.coalescing():
        for each in (*tensors, array):
            pg.allreduce(each)
        pg.broadcast(root, size - 1)
    assert all((host(each) == size * (size + 1) // 2).all() for each in tensors)
    assert array.tolist() == [size] * 4
    assert host(root).tolist() == [size - 1] * 2
    await pg.allreduce_coalesced(tensors, ReduceOp.MAX, key="list")
    assert all((host(each) == size * (size + 1) // 2).all() for each in tensors)


async def make_every_call(pg: ProcessGroup) -> str:
    rank, size = pg.rank(), pg.size()
    with gpus(1) as gpu:
        for count in (0, 1, 1000, 300_000):
            tensor = gpu.tensor(np.arange(count) + rank, 0)
            await pg.allreduce(tensor)
            assert np.array_equal(host(tensor), size * np.arange(count) + size * (size - 1) // 2)
            await pg.broadcast(tensor, size - 1)
            await pg.reduce(tensor, 0, ReduceOp.MAX)
            await pg.scan(tensor)
            assert np.array_equal(host(tensor), (rank + 1) * (size * np.arange(count) + size * (size - 1) // 2))
        await make_blocks(pg, gpu)
        parts = [gpu.tensor(np.full(3, rank * size + peer), 0) for peer in range(size)]
        into = [gpu.tensor(np.zeros(3, int), 0) for _ in range(size)]
        await pg.alltoall(into, parts)
        assert [host(each)[0] for each in into] == [peer * size + rank for peer in range(size)]
        right, left = (rank + 1) % size, (rank - 1) % size
        sent = pg.send(gpu.tensor(np.full(100_000, rank), 0), right, tag=2)
        tensor = gpu.tensor(np.zeros(100_000, int), 0)
        assert await pg.recv_anysource(tensor, tag=2) is tensor
        assert (host(tensor) == left).all()
        await sent
        assert dispatcher_of(pg).device_calls is not None
        assert dispatcher_of(pg).device_calls.state.decision is not None
        why = dispatcher_of(pg).device_calls.state.decision.why
        await pg.shutdown()
    return why


async def kill_rank_1(pg: ProcessGroup, reports: Path) -> None:
    with gpus(1) as gpu:
        await pg.allreduce(gpu.tensor(np.ones(3), 0))
        if pg.rank() == 1:
            for other in (0, 2):
                await pg.recv_object(other)
            os.kill(os.getpid(), signal.SIGKILL)
        await pg.send_object("ready", 1)
        work = pg.allreduce(gpu.tensor(np.ones(3), 0))
        error = await pg.wait_revoked()
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        with pytest.raises(PeerLostError):
            await work
        (reports / str(pg.rank())).touch()
        await pg.shutdown()


@pytest.mark.slow
async def test_killed_process_with_a_fake_device_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="rank 1"):
        await testing.run_processes(3, kill_rank_1, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "unix"])
async def test_ranks_in_processes_make_every_device_call(transport: str) -> None:
    options = GroupOptions(transport=transport)  # type: ignore[arg-type]
    whys = await testing.run_processes(3, make_every_call, options=options)
    assert whys == ["ranks 0 and 1 use the same device, 00000000:00:00.0, which NCCL refuses"] * 3
