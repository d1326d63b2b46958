"""Many small sums between processes that pause between data and flags: correct results, and no hang."""

from __future__ import annotations

import time

import pytest

from aiocoll import GroupOptions
from aiocoll.testing import run_processes

from . import pauses

#: By world size, the number of sums in `make test`, and in `make soak`. A machine may have fewer than four cores.
FEW = {2: 1000, 3: 600, 4: 400}
MANY = {2: 400_000, 3: 300_000, 4: 300_000}


async def run(world_size: int, operations: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pauses.SEED, str(seed))
    # Fences in C cannot be made to pause; `tests/native/race.c` tests their interleavings.
    monkeypatch.setenv("AIOCOLL_NATIVE", "0")
    options = GroupOptions(transport="shm")
    results = await run_processes(world_size, pauses.soak, operations, options=options, timeout=3600)
    assert len({done for done, _, _ in results}) == 1
    assert all(done >= operations for done, _, _ in results)
    assert [carriers for _, carriers, _ in results] == [["shm"]] * world_size
    assert all(paused for _, _, paused in results)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", FEW)
async def test_randomly_paused_processes_compute_correct_sums(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(world_size, FEW[world_size], 1, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", MANY)
async def test_randomly_paused_processes_compute_a_million_correct_sums(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a new random seed in each run, and print the seed."""
    seed = time.time_ns()
    print(f"seed {seed}")
    await run(world_size, MANY[world_size], seed, monkeypatch)
