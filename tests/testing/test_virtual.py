"""The virtual clock: waiting costs nothing, and a seed decides everything."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupOptions, PeerLostError, ProcessGroup, errors
from aiocoll.testing import VirtualLoop, run_virtual
from aiocoll.transport.frame import Header
from aiocoll.transport.memory import MemoryLink
from tests.testing.every import every_call

from ..internals import spied


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_passes_only_by_timers() -> None:
    async def wait(pg: ProcessGroup) -> float:
        for _ in range(1000):
            await pg.barrier()
        assert now() == 0
        await asyncio.sleep(86_400 * (1 + pg.rank()))
        return now()

    assert run_virtual(3, wait, timeout=None) == [86_400, 2 * 86_400, 3 * 86_400]


def test_a_rank_that_does_not_come_is_named_at_the_timeout() -> None:
    async def late(pg: ProcessGroup) -> tuple[Any, ...]:
        await pg.allreduce(np.ones(3))
        if pg.rank() == 2:
            await asyncio.sleep(1000)
        with pytest.raises((CollectiveTimeoutError, errors.GroupRevokedError)) as caught:
            await pg.barrier()
        return now(), type(caught.value).__name__, caught.value.ranks, str(caught.value)

    *waited, late_one = run_virtual(4, late)
    assert waited.pop(2)[:3] == (1000, "GroupRevokedError", (2,))
    for when, kind, ranks, text in (*waited, late_one):
        assert kind == "CollectiveTimeoutError"
        assert 300 <= when < 301
        assert ranks == (2,)
        assert "BARRIER (sequence 2)" in text
        assert "did not complete within 300 s" in text
        assert "it waits for rank 2 (last in ALLREDUCE(shape=[3], dtype=float64" in text


def test_a_warning_names_the_missing_rank_long_before(caplog: pytest.LogCaptureFixture) -> None:
    async def late(pg: ProcessGroup) -> float:
        if pg.rank() == 1:
            await asyncio.sleep(40)
        await pg.barrier()
        return now()

    with caplog.at_level(logging.WARNING, "aiocoll"):
        assert run_virtual(2, late, options=GroupOptions(warn_after=20)) == [40, 40]
    assert [record.getMessage() for record in caplog.records] == [
        "group 'world:0', rank 0: BARRIER (sequence 1), called as BARRIER(shape=[], device=cpu, counts=[], "
        "SequenceNumber=1), has been waiting for 20.0 s: it waits for rank 1 (in no operation yet)"
    ]


def test_a_rank_that_leaves_fails_what_needs_it() -> None:
    async def leave(pg: ProcessGroup) -> str | None:
        if pg.rank() == 1:
            return None
        with pytest.raises(PeerLostError, match="needs rank 1, which has left") as caught:
            await pg.barrier()
        assert caught.value.ranks == (1,)
        return caught.value.how

    assert run_virtual(3, leave, latency=(0.01, 0.1)) == ["left", None, "left"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_call_over_a_slow_network(world_size: int, seed: int) -> None:
    assert run_virtual(world_size, every_call, (3, 40_000), seed=seed, latency=(0.001, 0.5)) == [2] * world_size


def test_every_call_without_latency() -> None:
    assert run_virtual(4, every_call) == [3] * 4


Trace = list[tuple[float, int, int, Header]]


def trace(seed: int, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Return every delivery of a run: when, from whom, to whom, what."""
    found: Trace = []

    def arrived(link: MemoryLink, header: Header, _: bytes) -> None:
        found.append((asyncio.get_running_loop().time(), link.peer, sum(link.ends) - link.peer, header))

    with monkeypatch.context() as patch:
        spied(patch, memory_arrived=arrived)
        run_virtual(4, every_call, (2, 20_000), seed=seed, latency=(0.001, 0.2))
    return found


def test_a_seed_decides_every_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    first = trace(1, monkeypatch)
    assert len(first) > 500
    assert trace(1, monkeypatch) == first
    assert trace(2, monkeypatch) != first


PROGRAM = """
import hashlib, pytest
from tests.testing.test_virtual import trace
print(hashlib.sha256(repr(trace(1, pytest.MonkeyPatch())).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_order_does_not_depend_on_the_process() -> None:
    root = str(Path(__file__).parents[2])

    def run(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("1") == run("2")


def test_random_bytes_come_from_the_seed() -> None:
    def draw(seed: int) -> bytes:
        loop = VirtualLoop(seed)
        loop.close()
        return loop.aiocoll_runtime(loop).random_bytes(16)

    assert draw(3) == draw(3) != draw(4)


def test_a_deadlock_of_ranks_is_over_at_once() -> None:
    async def wait(pg: ProcessGroup) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="ranks 0 and 1 of 2 did not end within 3600 s"):
        run_virtual(2, wait)


def test_a_deadlock_without_any_timer_is_an_error() -> None:
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.raises(RuntimeError, match="deadlock: every task on the virtual clock waits, and no timer is set"),
    ):
        runner.run(asyncio.Event().wait())


def test_threads_are_refused() -> None:
    async def use_thread(pg: ProcessGroup) -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="cannot run in a thread on a virtual clock"):
        run_virtual(1, use_thread)


@pytest.mark.parametrize("latency", [(2, 1), (-1, 1)])
def test_a_wrong_latency_is_named(latency: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"latency=.*: give the shortest and the longest time in seconds"):
        run_virtual(1, every_call, latency=latency)
