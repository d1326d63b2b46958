"""The virtual clock: waits take no time, and the seed determines the order of all events."""

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
from tests.testing.all_calls import make_all_calls

from ..internals import observe_calls


def now() -> float:
    return asyncio.get_running_loop().time()


def test_virtual_time_passes_only_by_timers() -> None:
    async def wait(pg: ProcessGroup) -> float:
        for _ in range(1000):
            await pg.barrier()
        assert now() == 0
        await asyncio.sleep(86_400 * (1 + pg.rank()))
        return now()

    assert run_virtual(3, wait, timeout=None) == [86_400, 2 * 86_400, 3 * 86_400]


def test_timeout_error_in_virtual_time_names_the_absent_rank() -> None:
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


def test_warning_in_virtual_time_names_the_missing_rank_before_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
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


def test_calls_that_need_a_rank_fail_after_the_rank_has_left() -> None:
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
def test_every_call_completes_over_a_slow_virtual_network(world_size: int, seed: int) -> None:
    assert run_virtual(world_size, make_all_calls, (3, 40_000), seed=seed, latency=(0.001, 0.5)) == [2] * world_size


def test_every_call_completes_over_a_virtual_network_without_latency() -> None:
    assert run_virtual(4, make_all_calls) == [3] * 4


Deliveries = list[tuple[float, int, int, Header]]


def deliveries(seed: int, monkeypatch: pytest.MonkeyPatch) -> Deliveries:
    """Return the time, sender, receiver and header of every delivery in a run."""
    found: Deliveries = []

    def record_delivery(link: MemoryLink, header: Header, _: bytes) -> None:
        found.append((asyncio.get_running_loop().time(), link.peer, sum(link.ends) - link.peer, header))

    with monkeypatch.context() as patch:
        observe_calls(patch, receive_memory_frame=record_delivery)
        run_virtual(4, make_all_calls, (2, 20_000), seed=seed, latency=(0.001, 0.2))
    return found


def test_seed_determines_the_time_and_order_of_every_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    first = deliveries(1, monkeypatch)
    assert len(first) > 500
    assert deliveries(1, monkeypatch) == first
    assert deliveries(2, monkeypatch) != first


PROGRAM = """
import hashlib, pytest
from tests.testing.test_virtual import deliveries
print(hashlib.sha256(repr(deliveries(1, pytest.MonkeyPatch())).encode()).hexdigest())
"""


@pytest.mark.slow
def test_order_of_virtual_events_is_equal_in_every_process() -> None:
    root = str(Path(__file__).parents[2])

    def run(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("1") == run("2")


#: The order that `tasks_in_order` returns for seed 1.
ORDER = {
    "first": [2, 3, 0, 1],
    "second": [3, 0, 1, 2],
    "third": [0, 2, 3, 1],
    "timer": [3, 1, 0, 2],
    "call": [0, 1, 2, 3],
}


async def tasks_in_order(_: ProcessGroup | None = None) -> list[Any]:
    """Return the order of simultaneous events: first steps of tasks, later steps, timers, and plain callbacks."""
    order: list[Any] = []
    loop = asyncio.get_running_loop()

    async def task(number: int) -> None:
        order.append(f"first {number}")
        await asyncio.sleep(0)
        order.append(f"second {number}")
        await asyncio.sleep(1)
        order.append(f"third {number}")

    await asyncio.gather(*(task(number) for number in range(4)))
    for number in range(4):
        loop.call_later(1, order.append, f"timer {number}")
        loop.call_soon(order.append, f"call {number}")
    await asyncio.sleep(2)
    return order


def steps(order: list[str], kind: str) -> tuple[str, ...]:
    return tuple(each for each in order if each.startswith(kind))


@pytest.mark.parametrize("latency", [None, (0.01, 0.5)])
def test_different_seeds_produce_every_order_of_simultaneous_events(latency: Any) -> None:
    orders = [run_virtual(2, tasks_in_order, seed=seed, latency=latency)[0] for seed in range(60)]
    for kind in ("first", "second", "third", "timer"):
        found = {steps(order, kind) for order in orders}
        assert all(sorted(each) == [f"{kind} {number}" for number in range(4)] for each in found)
        # With probability 1 - 1/2000, 60 draws miss at most 4 of the 24 orders. The seeds are fixed.
        assert len(found) >= 20, kind
    assert {steps(order, "call") for order in orders} == {("call 0", "call 1", "call 2", "call 3")}


def test_seed_determines_the_order_of_tasks() -> None:
    orders = [run_virtual(3, tasks_in_order, seed=7) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2]


def test_different_seeds_change_the_order_of_ranks() -> None:
    def order(seed: int) -> tuple[int, ...]:
        begun: list[int] = []

        async def begin(pg: ProcessGroup) -> None:
            begun.append(pg.rank())

        run_virtual(3, begin, seed=seed)
        return tuple(begun)

    assert len({order(seed) for seed in range(30)}) > 1


def test_virtual_loop_keeps_the_order_of_task_steps_and_callbacks() -> None:
    """Check that tasks and callbacks run in the order in which a program schedules them."""

    async def main() -> list[str]:
        order: list[str] = []
        loop = asyncio.get_running_loop()

        async def step(name: str) -> None:
            order.append(name)

        tasks = []
        for number in range(5):
            tasks.append(loop.create_task(step(f"task {number}")))
            loop.call_soon(order.append, f"call {number}")
        woken = loop.create_future()
        woken.add_done_callback(lambda _: order.append("callback of a future"))
        waiting = loop.create_task(wait_for(woken, order))
        await asyncio.gather(*tasks)
        woken.set_result(None)
        await waiting
        return order

    async def wait_for(future: asyncio.Future[None], order: list[str]) -> None:
        await future
        order.append("woken")

    expected = [name for number in range(5) for name in (f"task {number}", f"call {number}")]
    for seed in range(20):
        with asyncio.Runner(loop_factory=lambda seed=seed: VirtualLoop(seed)) as runner:  # type: ignore[misc]
            assert runner.run(main()) == [*expected, "callback of a future", "woken"]


def test_task_cancelled_by_a_callback_does_not_run_again() -> None:
    async def wait_for(future: asyncio.Future[None]) -> None:
        await future

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        tasks = []
        for number in range(4):
            future = loop.create_future()
            future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
            tasks.append(loop.create_task(wait_for(future)))
        await asyncio.sleep(0)
        for task in tasks:
            loop.call_soon(task.cancel)
        await asyncio.wait(tasks)
        return order

    for seed in range(10):
        with asyncio.Runner(loop_factory=lambda seed=seed: VirtualLoop(seed)) as runner:  # type: ignore[misc]
            assert runner.run(main()) == [0, 1, 2, 3]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no eager tasks")
def test_seed_determines_the_order_of_eager_tasks() -> None:
    async def rank(pg: ProcessGroup) -> list[Any]:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        return await tasks_in_order(pg)

    orders = [run_virtual(2, rank, seed=seed)[0] for seed in (*range(30), *range(30))]
    assert orders[:30] == orders[30:]
    assert len({steps(order, "second") for order in orders}) >= 10
    assert {steps(order, "first") for order in orders} == {("first 0", "first 1", "first 2", "first 3")}


def test_event_order_of_a_seed_is_equal_on_every_python_version() -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(1)) as runner:
        order = runner.run(tasks_in_order())
    assert {kind: [int(each[-1]) for each in steps(order, kind)] for kind in ORDER} == ORDER


def test_random_bytes_in_a_virtual_run_are_derived_from_the_seed() -> None:
    def draw(seed: int) -> bytes:
        loop = VirtualLoop(seed)
        loop.close()
        return loop.aiocoll_runtime(loop).random_bytes(16)

    assert draw(3) == draw(3) != draw(4)


def test_deadlock_of_virtual_ranks_is_reported_at_once() -> None:
    async def wait(pg: ProcessGroup) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="ranks 0 and 1 of 2 did not end within 3600 s"):
        run_virtual(2, wait)


def test_virtual_deadlock_without_a_timer_raises_an_error() -> None:
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.raises(RuntimeError, match="deadlock: every task on the virtual clock waits, and no timer is set"),
    ):
        runner.run(asyncio.Event().wait())


def test_use_of_threads_in_a_virtual_run_is_refused() -> None:
    async def use_thread(pg: ProcessGroup) -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="cannot run in a thread on a virtual clock"):
        run_virtual(1, use_thread)


@pytest.mark.parametrize("latency", [(2, 1), (-1, 1)])
def test_error_names_a_wrong_latency(latency: tuple[float, float]) -> None:
    with pytest.raises(
        ValueError, match=r"latency=.*: give \(shortest, longest\) in seconds, with 0 <= shortest <= longest"
    ):
        run_virtual(1, make_all_calls, latency=latency)
