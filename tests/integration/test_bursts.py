"""Bursts of small operations between processes, whose frames are sent in batches."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import aiocoll
from aiocoll import GroupOptions
from aiocoll.testing import run_processes

#: The number of messages in a burst, which exceeds both a batch of frames and the window of eager bytes.
COUNT = 1200


async def run_bursts(pg: aiocoll.ProcessGroup) -> None:
    """Start many operations before the first await, in one task and in many tasks."""
    ranks, total = pg.size(), pg.size() * (pg.size() - 1) / 2
    arrays = [np.full(1 + 8 * (number % 128), float(pg.rank() + number)) for number in range(COUNT)]
    works = [pg.allreduce(array) for array in arrays]
    for number, work in enumerate(works):
        assert (await work == total + ranks * number).all()

    async def reduce_one(number: int) -> float:
        return await pg.allreduce(float(pg.rank() * number), key=str(number))

    # Start the tasks in a different order on each rank.
    numbers = np.roll(np.arange(200), 50 * pg.rank()).tolist()
    assert await asyncio.gather(*map(reduce_one, numbers)) == [total * number for number in numbers]

    right, left = (pg.rank() + 1) % ranks, (pg.rank() - 1) % ranks
    received = [pg.recv(np.empty(3), left, tag=tag) for tag in range(300)]
    sent = [pg.send(np.full(3, float(pg.rank() * tag)), right, tag=tag) for tag in range(300)]
    for tag, work in enumerate(received):
        assert (await work == left * tag).all()
    for work in sent:
        await work


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "transport"), [(2, "tcp"), (3, "unix")])
def test_burst_of_operations_gives_correct_results(world_size: int, transport: Literal["unix", "tcp"]) -> None:
    asyncio.run(run_processes(world_size, run_bursts, options=GroupOptions(transport=transport)))


async def send_and_block(pg: aiocoll.ProcessGroup, path: str) -> None:
    """Send five messages, and block rank 0's loop right after the last await until rank 1 has received them."""
    await pg.allreduce(0.0)
    if pg.rank() == 0:
        for number in range(5):
            await pg.send(np.full(1, float(number)), 1)
        os.close(os.open(path, os.O_RDONLY))
    else:
        for number in range(5):
            assert await pg.recv(np.empty(1), 0) == number
        os.close(os.open(path, os.O_WRONLY))


def test_data_of_an_awaited_send_has_left_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rank-1-is-done"
    os.mkfifo(path)
    asyncio.run(run_processes(2, send_and_block, str(path), timeout=30))
