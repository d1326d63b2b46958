"""Failures on a device: every rank reports them, no rank hangs, and all processes end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from aiocoll import GroupClosedError, GroupError, ProcessGroup, new_group
from aiocoll.store import HashStore

from ...ranks import run_ranks
from ..groups import WAYS
from .base import reduced_and_gated
from .worlds import World, possible_ranks, world

both = pytest.mark.parametrize("way", WAYS)
ROOT = Path(__file__).parents[3]
#: The time limit of a test process in seconds, mostly for the start of CUDA.
HUNG = 40.0


@both
async def test_group_can_be_aborted_during_a_long_kernel(kind: str, way: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> None:
        _, tensor, gate = await reduced_and_gated(pg, made)
        works = [pg.allreduce(tensor) for _ in range(3)]
        await pg.barrier()
        start = perf_counter()
        pg.abort("enough")
        for work in works:
            with pytest.raises(GroupError, match="enough"):
                await work
        made.figure(
            f"from abort to the failure of what was pending, {way}: ms", round((perf_counter() - start) * 1e3, 3)
        )
        gate.open()
        start = perf_counter()
        await pg.shutdown()
        made.figure(f"shutdown after abort, {way}: ms", round((perf_counter() - start) * 1e3, 3))

    with world(kind, way, 2) as made:
        for device in range(made.devices):
            made.stream(device)
        await run_ranks(possible_ranks(made, way, 2), body, made)


@both
async def test_new_group_works_after_an_abort(kind: str, way: str) -> None:
    with world(kind, way, 1) as made:
        for number in range(3):
            pg = await new_group(store=HashStore(), rank=0, world_size=1)
            tensor = made.tensor(np.ones(3))
            await pg.allreduce(tensor)
            if number < 2:
                pg.abort("again")
            await pg.shutdown()
            await pg.shutdown()
            with pytest.raises(GroupClosedError):
                pg.allreduce(tensor)
            await asyncio.sleep(0)


def output_of_process(how: str, kind: str) -> str:
    """Run a process of `exits.py`, which must end by itself; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.on_device.exits", how, kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_communicator_that_waits_for_a_missing_peer_is_reported(kind: str) -> None:
    assert "NCCL has not created the communicator on device 0: restart the process" in output_of_process("lonely", kind)


def test_process_can_exit_during_an_abort_of_a_communicator(kind: str) -> None:
    """Check that NCCL is not unloaded while the aborting thread uses it."""
    assert output_of_process("aborting", kind).splitlines()[-1] == "aborted"


def test_process_can_exit_with_an_open_group(kind: str) -> None:
    assert output_of_process("unclosed", kind).splitlines()[-1] == "[1.0, 1.0, 1.0]"  # after NCCL version lines


def test_new_group_works_after_an_unclosed_group_is_garbage_collected(kind: str) -> None:
    """Check that garbage collection does not end the communicator, which would wait for other ranks."""

    async def forget(made: World) -> None:
        pg = await new_group(store=HashStore(), rank=0, world_size=1)
        assert made.host(await pg.allreduce(made.tensor(np.ones(3)))).tolist() == [1] * 3

    with world(kind) as made:
        for _ in range(3):
            asyncio.run(forget(made))
            gc.collect()
