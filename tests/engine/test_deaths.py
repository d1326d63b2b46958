"""Reports of a death to all groups of the dead rank, on ranks with and without a link to the dead rank."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, PeerLostError, ProcessGroup
from aiocoll.process import PidFd

from ..internals import comm_of
from .test_shrink import Job, now


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_death_is_reported_to_every_rank_in_every_group(world_size: int) -> None:
    """Include groups of two ranks: if one rank dies, only ranks outside the group can report the death."""
    for victim in range(world_size):
        job = Job()

        async def body(pg: ProcessGroup, job: Job = job, victim: int = victim) -> Any:
            pairs = [
                await pg.split_group([min(victim, rank), max(victim, rank)])
                for rank in range(world_size)
                if rank != victim
            ]
            if pg.rank() == victim:
                # Kill the victim early, since a rank that waits longer in a receive would open a link by itself.
                await asyncio.sleep(0.1)
                job.kill(victim)
                await asyncio.get_running_loop().create_future()
            (pair,) = [pair for pair in pairs if pair is not None]
            start = now()
            with pytest.raises(PeerLostError) as raised:
                await pair.recv(np.zeros(1), 1 - pair.rank())
            assert now() - start < 6.5
            assert raised.value.ranks == (1 - pair.rank(),)
            with pytest.raises(GroupError):
                await pg.barrier()
            await asyncio.sleep(1)
            await pair.shutdown()
            return True

        expected = [None if rank == victim else True for rank in range(world_size)]
        assert job.run(world_size, body, linked=False) == expected


def test_death_handler_raises_no_exceptions() -> None:
    """Set an exception handler of the event loop, since asyncio only logs exceptions that callbacks raise."""
    job = Job()
    contexts: list[dict[str, Any]] = []

    async def body(pg: ProcessGroup) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        if pg.rank() == 1:
            await job.die(1)
        with pytest.raises(PeerLostError):
            await pg.allreduce(np.ones(3))
        await asyncio.sleep(1)

    job.run(3, body)
    assert contexts == []


@pytest.mark.ranks(2)
async def test_process_check_does_nothing_after_the_shutdown_of_the_rank(pg: ProcessGroup) -> None:
    """Close a group before the process check runs, as a program may do before it calls `shrink`."""
    failure_detector = comm_of(pg).endpoint.failure_detector
    failure_detector._pidfds[1 - pg.rank()] = PidFd(os.pidfd_open(os.getpid()))
    failure_detector.check_process(1 - pg.rank())
    await pg.shutdown()
    failure_detector.check_process(1 - pg.rank())
