"""`monitored_barrier` and its errors, which name the missing ranks on every rank."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from aiocoll import ProcessGroup
from aiocoll.errors import CollectiveTimeoutError
from aiocoll.testing.virtual import run_virtual

from ..ranks import LINKS, parametrize_transports, run_ranks


@pytest.mark.parametrize("transport", LINKS)
async def test_monitored_barrier_waits_for_all_ranks(transport: str) -> None:
    arrived = 0

    async def rank(pg: ProcessGroup) -> None:
        nonlocal arrived
        for _ in range(20):
            await asyncio.sleep(0.001 * (pg.rank() % 3))
            arrived += 1
            await pg.monitored_barrier()
            assert arrived >= 5
            await pg.barrier()
            arrived = 0
            await pg.barrier()

    await run_ranks(5, rank, transport=transport)


def failures(
    missing: set[int], timeouts: dict[int, Any], wait_all_ranks: bool, latency: tuple[float, float] | None = None
) -> dict[int, CollectiveTimeoutError]:
    """Call `monitored_barrier` on all of four ranks except the `missing` ones; return the error of each rank."""

    async def rank(pg: ProcessGroup) -> CollectiveTimeoutError | None:
        await pg.barrier()
        if pg.rank() in missing:
            await asyncio.sleep(100)
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            await pg.monitored_barrier(timeouts.get(pg.rank(), 2.0), wait_all_ranks)
        return caught.value

    errors = run_virtual(4, rank, latency=latency)
    assert {rank for rank, error in enumerate(errors) if error is None} == missing
    return {rank: error for rank, error in enumerate(errors) if error is not None}


@pytest.mark.parametrize(
    ("timeout", "words"), [(2.0, "2000 ms"), (timedelta(seconds=2), "2000 ms"), (0.1, "100 ms"), (0.0004, "0.4 ms")]
)
def test_monitored_barrier_error_names_all_missing_ranks(timeout: Any, words: str) -> None:
    for error in failures({1, 3}, {0: timeout}, True).values():
        assert f"Ranks 1, 3 failed to pass monitoredBarrier in {words}" in str(error)
        assert (error.ranks, error.op, error.seq) == ((1, 3), "MONITORED_BARRIER", 2)


def test_monitored_barrier_error_names_the_first_missing_rank() -> None:
    for error in failures({1, 3}, {}, False).values():
        assert "Ranks 1 failed to pass monitoredBarrier in 2000 ms" in str(error)
        assert error.ranks == (1,)


def test_monitored_barrier_error_of_a_rank_with_a_shorter_timeout_names_the_missing_ranks() -> None:
    for error in failures({1, 3}, {2: 1.0}, True).values():
        assert "[rank 2 of group" in str(error)
        assert "Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms; check the log of rank 0" in str(error)


def test_monitored_barrier_error_names_missing_rank_0() -> None:
    for error in failures({0}, {}, True).values():
        assert "Ranks 0 failed to pass monitoredBarrier in 2000 ms" in str(error)


def test_monitored_barrier_error_without_a_report_refers_to_rank_0() -> None:
    # The timeout of rank 2 is shorter than the latency, so that no reply can reach rank 2 in time.
    for error in failures({3}, {2: 0.01}, True, (0.02, 0.02)).values():
        assert "check its log, which names the missing ranks" in str(error)
        assert error.ranks == (0,)


@pytest.mark.ranks(5)
@parametrize_transports(*LINKS)
async def test_monitored_barrier_error_uses_the_rank_numbers_of_its_subgroup(pg: ProcessGroup) -> None:
    """Let global ranks 2 and 4, which are ranks 1 and 2 of the subgroup, make no call."""
    part = await pg.split_group([1, 2, 4])
    if part is None:
        return
    await part.barrier()
    if part.rank() == 0:
        with pytest.raises(CollectiveTimeoutError) as caught:
            await part.monitored_barrier(0.1, wait_all_ranks=True)
        assert str(caught.value).startswith(f"[rank 0 of group {part.group_name!r}] Ranks 1, 2 failed to pass")
        assert caught.value.ranks == (1, 2)
    else:
        cause = await part.wait_revoked()
        assert "[rank 0 of group" in str(cause)
        assert "Ranks 1, 2 failed to pass monitoredBarrier in 100 ms" in str(cause)
