"""Jobs with more processes than cores, and a process with so many ranks that opening links takes seconds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.testing import run_processes
from tests.ranks import parametrize_transports
from tests.testing.all_calls import make_all_calls

#: A program that forms a group and prints the sum of all rank numbers, counted from 1.
SUM = """
import asyncio
import numpy as np
import aiocoll

async def main():
    async with aiocoll.new_group(timeout=1800) as pg:
        print(await pg.allreduce(np.float64(pg.rank() + 1)), flush=True)

asyncio.run(main())
"""
#: The timeout in seconds for a start of 128 processes, which takes minutes on two shared cores.
LIMIT = 1800


@pytest.mark.soak
def test_group_of_sixteen_processes_makes_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert asyncio.run(run_processes(16, make_all_calls, (1, 1000, 20_000))) == [3] * 16
    assert not list(tmp_path.iterdir())
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(5))
def test_group_of_128_processes_forms(start: int, tmp_path: Path) -> None:
    """Check that no rank is reported lost although handshakes block the event loops for seconds."""
    script = tmp_path / "script.py"
    script.write_text(SUM)
    command = [sys.executable, "-m", "aiocoll", "run", "-n", "128", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            out, err = launcher.communicate(timeout=LIMIT)
        finally:
            launcher.terminate()  # does nothing if the launcher has ended
    assert launcher.returncode == 0, err
    assert [line.split()[-1] for line in out.splitlines()] == ["8256.0"] * 128, err


@pytest.mark.slow
@pytest.mark.ranks(64, timeout=600.0)
@parametrize_transports(
    "unix", pytest.param("memory", marks=pytest.mark.soak), pytest.param("shm", marks=pytest.mark.soak)
)
async def test_group_of_64_ranks_runs_every_collective(pg: ProcessGroup) -> None:
    size, rank = pg.size(), pg.rank()
    total = size * (size - 1) // 2
    await pg.barrier()
    assert await pg.allreduce(rank) == total
    assert (await pg.allreduce(np.full(5000, rank)) == total).all()
    assert await pg.reduce(rank, 5) == (total if rank == 5 else rank)
    assert await pg.broadcast(rank, 63) == 63
    assert await pg.scan(1) == rank + 1
    assert await pg.exscan(1) == (rank or 1)
    assert [each.tolist() for each in await pg.allgather(None, np.array([rank]))] == [[r] for r in range(size)]
    gathered = await pg.gather(None, np.array([rank]), 7)
    assert gathered is None or [int(each[0]) for each in gathered] == list(range(size))
    inputs = [np.array([3 * block]) for block in range(size)] if rank == 9 else None
    assert (await pg.scatter(np.zeros(1, int), inputs, 9))[0] == 3 * rank
    assert (await pg.reduce_scatter_tensor(np.zeros(1, int), np.arange(size)))[0] == size * rank
    assert (await pg.alltoall_base(np.zeros(size, int), np.full(size, rank))).tolist() == list(range(size))
    assert await pg.allgather_object(rank) == list(range(size))
