"""Timeout errors and warnings, in which all waiting ranks name the same missing ranks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupOptions, ProcessGroup, Work
from aiocoll.engine.failure.stall_inspector import StallInspector
from aiocoll.testing.virtual import run_virtual

from ..internals import observe_methods

LATENCY = (0.0005, 0.002)


@pytest.mark.parametrize("timeout", [0.05, 0.2, 0.6, 3.0, 100.0])
@pytest.mark.parametrize("missing", [{0}, {2}, {0, 1}, {3, 1}])
def test_timeout_errors_of_all_waiting_ranks_name_the_same_missing_ranks(missing: set[int], timeout: float) -> None:
    """Include the lowest rank, which would be the coordinator, among the missing ranks."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() in missing:
            await pg.wait_revoked()
            return
        with pytest.raises(CollectiveTimeoutError) as raised:
            await pg.allreduce(np.zeros((2, 3), np.float32), timeout=timeout)
        error = raised.value
        assert (error.ranks, error.op, error.seq) == (tuple(sorted(missing)), "ALLREDUCE", 2)
        text = str(error)
        assert f"did not complete within {timeout:g} s" in text
        assert "ALLREDUCE(shape=[2, 3], dtype=float32" in text
        for each in missing:
            assert f"rank {each} (last in BARRIER(" in text

    run_virtual(4, rank, latency=LATENCY)


def test_timeout_error_of_a_keyed_operation_contains_the_key() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await asyncio.sleep(0.5)
            work = pg.broadcast(np.zeros(2), 0)
            await pg.wait_revoked()
            assert work.done()
            return
        with pytest.raises(CollectiveTimeoutError) as raised:
            await pg.allreduce(np.zeros(5), key="layer3.grad", timeout=2)
        text = str(raised.value)
        assert raised.value.seq == "layer3.grad"
        assert "ALLREDUCE (sequence 'layer3.grad')" in text
        assert "shape=[5]" in text
        assert "it waits for rank 0 (last in BROADCAST(shape=[2]" in text

    run_virtual(3, rank, latency=LATENCY)


def test_timeout_error_names_a_missing_rank_that_has_made_no_calls() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            await pg.wait_revoked()
            return
        with pytest.raises(CollectiveTimeoutError, match=r"it waits for rank 1 \(in no operation yet\)"):
            await pg.barrier(timeout=1)

    run_virtual(3, rank)


def test_timeout_error_shows_the_last_reported_operation_of_a_missing_rank() -> None:
    """Let the missing rank 1 make other calls after the other ranks have queried its operations for the first time."""

    async def rank(pg: ProcessGroup) -> None:
        works: list[Work[Any]] = []
        if pg.rank() == 1:
            for _ in range(10):
                await asyncio.sleep(1)
                await pg.send(np.zeros(1), 0)
                works.append(pg.allreduce(np.zeros(1), key="other"))
            await pg.wait_revoked()
            await asyncio.gather(*works, return_exceptions=True)
            return
        if pg.rank() == 0:
            works.extend(pg.recv(np.zeros(1), 1) for _ in range(10))
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 \(last in ALLREDUCE\(.*key=other.*\), 10\.0 s ago\)"):
            await pg.barrier(timeout=20)
        await asyncio.gather(*works)

    run_virtual(3, rank)


def test_number_of_stall_report_messages_grows_linearly_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the number of messages does not grow with the square of the number of ranks."""
    messages_sent = 0

    def count(*_: Any) -> None:
        nonlocal messages_sent
        messages_sent += 1

    observe_methods(monkeypatch, StallInspector, handle=count)

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 5:
            await asyncio.sleep(10)
        await pg.barrier()

    run_virtual(32, rank, latency=LATENCY)
    # Messages per rank and second: a stall report with its reply, a query with its reply, and a summary of the replies.
    assert 32 * 10 <= messages_sent <= 32 * 11 * 6


def test_late_rank_is_logged_once_per_waiting_rank_and_operation(caplog: pytest.LogCaptureFixture) -> None:

    async def rank(pg: ProcessGroup) -> None:
        for late in range(2):
            if pg.rank() == late:
                await asyncio.sleep(10)
            await pg.allreduce(np.zeros(1), timeout=60)

    with caplog.at_level(logging.WARNING, logger="aiocoll"):
        run_virtual(3, rank, latency=LATENCY, options=GroupOptions(warn_after=5))
    warnings = [record.getMessage() for record in caplog.records]
    for late, waiting in itertools.product(range(2), range(3)):
        found = [text for text in warnings if f"rank {waiting}: ALLREDUCE (sequence {late + 1})" in text]
        assert len(found) == (late != waiting)
        assert all(f"it waits for rank {late} (" in text for text in found)


def test_timeout_error_of_a_message_names_its_peer(caplog: pytest.LogCaptureFixture) -> None:
    """Check a pending message: ranks send no stall queries about messages, which only their two ends know."""

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            receives = [pg.recv(np.zeros(1), 1, tag=7), pg.recv_anysource(np.zeros(1), tag=8)]
            await asyncio.sleep(10)
            await pg.send(np.zeros(1), 1)
            await pg.recv(np.zeros(1 << 20), 1)
            await asyncio.gather(*receives)
        else:
            large = pg.send(np.zeros(1 << 20), 0)
            await pg.recv(np.zeros(1), 0)
            await pg.send(np.zeros(1), 0, tag=7)
            await pg.send(np.zeros(1), 0, tag=8)
            await large

    with caplog.at_level(logging.WARNING, logger="aiocoll"):
        run_virtual(2, rank, latency=LATENCY, options=GroupOptions(warn_after=5))
    warnings = sorted(record.getMessage() for record in caplog.records)
    ends = [
        "5.0 s: no message with tag 7 has arrived from rank 1",
        "5.0 s: no message with tag 8 has arrived from any rank",
        "5.0 s: no message with tag 0 has arrived from rank 0",
        "5.0 s: rank 0 has not received the whole message",
    ]
    assert [text.split("waiting for ")[1] for text in warnings] == ends
    assert not any("sequence" in text for text in warnings)
