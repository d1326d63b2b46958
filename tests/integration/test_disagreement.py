"""Mismatches between ranks in separate processes."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import pytest

import aiocoll
from aiocoll import CollectiveMismatchError, GroupOptions, GroupRevokedError
from aiocoll.testing import run_processes
from tests.engine.test_mismatch import SOON, TABLE, Case, CaseReport, check, disagree

#: One mismatch case of each kind, and the cases in which no data frame reveals the mismatch.
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


async def run_all_cases(pg: aiocoll.ProcessGroup) -> list[CaseReport]:
    """Run each mismatch case in a separate group, each time with another odd rank; return the mismatch reports."""
    reports = []
    for number, case in enumerate(CASES):
        async with aiocoll.new_group() as group:
            reports.append(await disagree(group, case, number % pg.size(), (0.0, 0.0)))
        await pg.barrier()
    return reports


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "transport"), [(2, "tcp"), (3, "shm"), (4, "unix")])
def test_mismatch_is_reported_on_every_process(world_size: int, transport: Literal["unix", "tcp", "shm"]) -> None:
    assert len(CASES) == len(NAMES)
    results = asyncio.run(run_processes(world_size, run_all_cases, options=GroupOptions(transport=transport)))
    for number, (case, reports) in enumerate(zip(CASES, zip(*results, strict=True), strict=True)):
        check(case, number % world_size, world_size, list(reports))


async def disagree_with_blocked_hub(pg: aiocoll.ProcessGroup) -> tuple[float, float, str]:
    """Make mismatched calls while the event loop of rank 0, which relays control messages, is blocked."""
    case = next(case for case in TABLE if case.name == "dtype-allreduce")
    await pg.allreduce(0.0)  # opens all links
    if pg.rank() == 0:
        time.sleep(2)  # noqa: ASYNC251 - blocks the loop on purpose
        cause = await pg.wait_revoked()
        with pytest.raises(GroupRevokedError):
            pg.barrier()
        assert isinstance(cause, CollectiveMismatchError)
        return 0.0, 0.0, str(cause)
    report = await disagree(pg, case, 2, (0.0, 0.0))
    return report.called, report.failed, report.text


@pytest.mark.slow
def test_mismatch_between_two_processes_is_reported() -> None:
    results = asyncio.run(run_processes(3, disagree_with_blocked_hub))
    called, received, texts = zip(*results, strict=True)
    assert max(received) <= max(called) + SOON
    assert len(set(texts)) == 1
    assert "rank 1 called ALLREDUCE(" in texts[0]
    assert "rank 2 called ALLREDUCE(" in texts[0]
