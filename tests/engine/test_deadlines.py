"""Deadlines and detection times on a virtual clock, which moves only while all ranks wait."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, CollectiveTimeoutError, ProcessGroup, ReduceOp
from aiocoll.testing.virtual import run_virtual

#: Shortest and longest latency of a frame in seconds.
LATENCY = (0.0005, 0.02)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_mismatch_is_reported_within_a_second_after_the_last_call() -> None:
    """Let each rank wait for the broadcast of the other rank, so that no data reveals the mismatch."""

    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(40 * pg.rank())
        with pytest.raises(CollectiveMismatchError, match=r"root=1.*root=0"):
            await pg.broadcast(np.zeros(3), 1 - pg.rank())
        assert now() < 41

    run_virtual(2, rank, latency=LATENCY)


@pytest.mark.parametrize("timeout", [0.01, 0.2, 3.0, 100.0])
def test_timeout_expires_within_one_report_period_of_its_deadline(timeout: float) -> None:
    async def rank(pg: ProcessGroup) -> None:
        started = now()
        if pg.rank() == 2:
            await pg.wait_revoked()
        else:
            with pytest.raises(CollectiveTimeoutError, match=f"within {timeout:g} s") as raised:
                await pg.allreduce(np.zeros(3), timeout=timeout)
            assert raised.value.ranks == ((2,) if timeout > 0.1 else ())
        # One of the two waiting ranks times out first, on time, and notifies the other ranks.
        assert abs(now() - started - timeout) < 0.1

    run_virtual(3, rank, latency=LATENCY)


@pytest.mark.slow
def test_timeout_of_the_oldest_call_expires_first() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank():
            await pg.wait_revoked()
            return
        works = []
        for _ in range(100):
            works.append(pg.barrier(timeout=50))
            await asyncio.sleep(0.1)
        with pytest.raises(CollectiveTimeoutError, match=r"sequence 1\)"):
            await works[99]

    run_virtual(2, rank)


def test_missing_rank_is_logged_before_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 1:
            await asyncio.sleep(100)
        await pg.allreduce(np.zeros(3), timeout=200)
        assert now() >= 100

    with caplog.at_level(logging.WARNING, logger="aiocoll"):
        run_virtual(3, rank, latency=LATENCY)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    for rank, warning in zip((0, 2), sorted(warnings), strict=True):
        assert f"rank {rank}: ALLREDUCE (sequence 2), called as ALLREDUCE(shape=[3], dtype=float64" in warning
        assert "has been waiting for 30." in warning
        # The last operation of rank 1 ended 30 s ago, but rank 1 has reported the operation recently.
        assert re.search(r"it waits for rank 1 \(last in BARRIER\(.*SequenceNumber=1\), 30\.\d s ago\)$", warning)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_results_do_not_depend_on_the_latency(seed: int) -> None:
    """Check several seeds: each one gives frames other latencies, so that frames of different links are reordered."""

    async def rank(pg: ProcessGroup) -> list[bytes]:
        chance = random.Random(seed)
        results = []
        works: list[tuple[Any, Any]] = []
        for number in range(30):
            count = chance.choice([0, 1, 7, 1000, 70_000, 200_000])
            kind = chance.choice(["allreduce", "scan", "broadcast", "reduce_scatter", "allgather", "barrier"])
            key = chance.choice([None, f"key{number}"])
            tensor = np.full(count, pg.rank() + 1.0)
            if kind == "allreduce":
                works.append((pg.allreduce(tensor, chance.choice([ReduceOp.SUM, ReduceOp.MAX]), key=key), tensor))
            elif kind == "scan":
                works.append((pg.scan(tensor, key=key), tensor))
            elif kind == "broadcast":
                works.append((pg.broadcast(tensor, chance.randrange(4), key=key), tensor))
            elif kind == "reduce_scatter":
                works.append((pg.reduce_scatter(tensor, [tensor.copy() for _ in range(4)], key=key), tensor))
            elif kind == "allgather":
                outputs = np.zeros((4, count))
                works.append((pg.allgather(list(outputs), tensor, key=key), outputs))
            else:
                works.append((pg.barrier(key=key), tensor))
            await asyncio.sleep(random.Random(seed * 31 + pg.rank()).uniform(0, 0.05))
        for work, tensor in works:
            await work
            results.append(tensor.tobytes())
        return results

    assert run_virtual(4, rank, seed=seed, latency=LATENCY) == run_virtual(4, rank, seed=seed)


@pytest.mark.ranks(2)
async def test_timeout_below_a_millisecond_expires(pg: ProcessGroup) -> None:
    """Check short delays, for which uvloop returns a handle without the method `when`."""
    works = [pg.recv(np.zeros(1), 1 - pg.rank(), timeout=1e-4) for _ in range(2)]
    for work in works:
        with pytest.raises(CollectiveTimeoutError):
            await work
