"""Ranks that disagree, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import pytest

import aiocoll
from aiocoll import CollectiveMismatchError, GroupOptions, GroupRevokedError
from aiocoll.testing import run_processes
from tests.engine.test_mismatch import SOON, TABLE, Case, Told, check, disagree

#: Of each kind of disagreement one, and those that no data tells.
NAMES = (
    "allreduce-reduce",
    "dtype-allreduce",
    "count-allgather",
    "short-gather",
    "long-scatter",
    "full-broadcast",
    "empty-allreduce",
    "root-broadcast",
    "custom",
    "order",
    "key-alltoall",
    "object-array",
)
CASES: list[Case] = [case for case in TABLE if case.name in NAMES]


async def each_in_a_group(pg: aiocoll.ProcessGroup) -> list[Told]:
    """Go through all cases, another rank being odd in each."""
    told = []
    for number, case in enumerate(CASES):
        async with aiocoll.new_group() as group:
            told.append(await disagree(group, case, number % pg.size(), (0.0, 0.0)))
        await pg.barrier()
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "transport"), [(2, "tcp"), (3, "shm"), (4, "unix")])
def test_mismatch_is_found_on_every_process(world_size: int, transport: Literal["unix", "tcp", "shm"]) -> None:
    assert len(CASES) == len(NAMES)
    results = asyncio.run(run_processes(world_size, each_in_a_group, options=GroupOptions(transport=transport)))
    for number, (case, told) in enumerate(zip(CASES, zip(*results, strict=True), strict=True)):
        check(case, number % world_size, world_size, list(told))


async def beside_a_blocked_rank(pg: aiocoll.ProcessGroup) -> tuple[float, float, str]:
    """Rank 0, which the others' control links lead to, does not let its loop turn."""
    case = next(case for case in TABLE if case.name == "dtype-allreduce")
    await pg.allreduce(0.0)  # all links are there
    if pg.rank() == 0:
        time.sleep(2)  # noqa: ASYNC251 - that is the point
        cause = await pg.wait_revoked()
        with pytest.raises(GroupRevokedError):
            pg.barrier()
        assert isinstance(cause, CollectiveMismatchError)
        return 0.0, 0.0, str(cause)
    told = await disagree(pg, case, 2, (0.0, 0.0))
    return told.called, told.heard, told.text


@pytest.mark.slow
def test_mismatch_of_two_processes_is_found() -> None:
    results = asyncio.run(run_processes(3, beside_a_blocked_rank))
    called, heard, texts = zip(*results, strict=True)
    assert max(heard) <= max(called) + SOON
    assert len(set(texts)) == 1
    assert "rank 1 called ALLREDUCE(" in texts[0]
    assert "rank 2 called ALLREDUCE(" in texts[0]
