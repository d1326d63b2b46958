"""Awaits cancelled at every step: collectives continue, receives are withdrawn, and no message is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, Recv, ReduceOp, Send, Work
from aiocoll.testing.virtual import run_virtual

from ..internals import comm_of
from ..ranks import parametrize_transports, run_ranks

SIZE = 3
#: Array lengths in float64 elements: one that is sent eagerly, and one that is too long for an eager message.
COUNTS = (5, 70_001)
#: The latency of a frame in seconds; all events between two frames then form one step.
LATENCY = 0.001
#: More steps than any call takes. A test that exceeds this number has hung.
MOST = 400


def block(rank: int, n: int) -> np.ndarray:
    return np.arange(n, dtype="f8") + rank


def total(n: int) -> np.ndarray:
    return SIZE * np.arange(n) + SIZE * (SIZE - 1) // 2


Call = Callable[[ProcessGroup, int], tuple[Work[Any], Any]]


def alltoall(pg: ProcessGroup, n: int) -> tuple[Work[Any], Any]:
    inputs = [block(pg.rank() + rank, n) for rank in range(SIZE)]
    return pg.alltoall([np.zeros(n) for _ in range(SIZE)], inputs), inputs


def reduce_scatter(pg: ProcessGroup, n: int) -> tuple[Work[Any], Any]:
    inputs = [block(pg.rank() + rank, n) for rank in range(SIZE)]
    return pg.reduce_scatter(np.zeros(n), inputs), total(n) + SIZE * pg.rank()


#: Functions that start a call and return its work and the expected result.
CALLS: dict[str, Call] = {
    "allreduce": lambda pg, n: (pg.allreduce(block(pg.rank(), n)), total(n)),
    "allreduce-links": lambda pg, n: (pg.allreduce(block(pg.rank(), n), ReduceOp.custom(np.add)), total(n)),
    "keyed": lambda pg, n: (pg.allreduce(block(pg.rank(), n), key="k"), total(n)),
    "reduce": lambda pg, n: (pg.reduce(block(pg.rank(), n), 1), total(n) if pg.rank() == 1 else block(pg.rank(), n)),
    "broadcast": lambda pg, n: (pg.broadcast(block(pg.rank(), n), 1), block(1, n)),
    "scan": lambda pg, n: (pg.scan(block(pg.rank(), n)), sum(block(rank, n) for rank in range(pg.rank() + 1))),
    "exscan": lambda pg, n: (
        pg.exscan(block(pg.rank(), n)),
        sum(block(rank, n) for rank in range(pg.rank())) if pg.rank() else block(0, n),
    ),
    "allgather": lambda pg, n: (pg.allgather(None, block(pg.rank(), n)), [block(rank, n) for rank in range(SIZE)]),
    "gather": lambda pg, n: (
        pg.gather(None, block(pg.rank(), n), 1),
        [block(rank, n) for rank in range(SIZE)] if pg.rank() == 1 else None,
    ),
    "scatter": lambda pg, n: (
        pg.scatter(np.zeros(n), [block(rank, n) for rank in range(SIZE)] if pg.rank() == 1 else None, 1),
        block(pg.rank(), n),
    ),
    "reduce_scatter": reduce_scatter,
    "alltoall": alltoall,
    "barrier": lambda pg, n: (pg.barrier(), None),
    "monitored_barrier": lambda pg, n: (pg.monitored_barrier(), None),
    "broadcast_object": lambda pg, n: (pg.broadcast_object(bytes(n) if pg.rank() == 1 else None, 1), bytes(n)),
    "allgather_object": lambda pg, n: (pg.allgather_object([pg.rank(), n]), [[rank, n] for rank in range(SIZE)]),
    "alltoall_object": lambda pg, n: (
        pg.alltoall_object([(pg.rank(), rank) for rank in range(SIZE)]),
        [(rank, pg.rank()) for rank in range(SIZE)],
    ),
}


async def cancel_after(waiting: asyncio.Task[Any], steps: int, seconds: float) -> bool:
    """Cancel the task `waiting` after some steps; return whether the task was still pending."""
    for _ in range(steps):
        if waiting.done():
            break
        await asyncio.sleep(seconds)
    waiting.cancel()
    await asyncio.wait([waiting])
    return waiting.cancelled()


async def cancel_at_every_step(pg: ProcessGroup, call: Call, n: int, seconds: float) -> None:
    """Repeat a call, and cancel its await one step later each time, on one rank or on all ranks."""
    for steps in count():
        assert steps < MOST
        early = []
        for victims in ({0}, {SIZE - 1}, set(range(SIZE))):
            work, expected = call(pg, n)
            waiting = asyncio.ensure_future(work.join())
            if pg.rank() in victims:
                early.append(await cancel_after(waiting, steps, seconds))
            else:
                await waiting
            await pg.drain()
            assert work.done()
            np.testing.assert_equal(work.result(), expected)
        if not await pg.allreduce(any(early), ReduceOp.MAX):
            assert steps > 0
            return


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, LATENCY / 2], ids=["turns", "latency"])
@pytest.mark.parametrize("name", CALLS)
def test_collective_continues_after_its_await_is_cancelled(name: str, seconds: float) -> None:
    async def rank(pg: ProcessGroup) -> None:
        for n in COUNTS:
            await cancel_at_every_step(pg, CALLS[name], n, seconds)

    run_virtual(SIZE, rank, latency=(LATENCY, LATENCY) if seconds else None)


@pytest.mark.slow
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.ranks(SIZE)
@parametrize_transports("unix")
async def test_collective_over_sockets_continues_after_its_await_is_cancelled(pg: ProcessGroup, n: int) -> None:
    for name in CALLS:
        if name != "keyed":
            await cancel_at_every_step(pg, CALLS[name], n, 0)


#: A function that runs a test in steps. A step is a loop iteration, or a period of virtual time between two frames.
Runner = Callable[[Callable[[ProcessGroup, float], Any]], None]


def step_by_iteration(fn: Callable[[ProcessGroup, float], Any]) -> None:
    run_virtual(2, fn, 0)


def step_by_latency(fn: Callable[[ProcessGroup, float], Any]) -> None:
    run_virtual(2, fn, LATENCY / 2, latency=(LATENCY, LATENCY))


def step_over_sockets(fn: Callable[[ProcessGroup, float], Any]) -> None:
    asyncio.run(run_ranks(2, fn, 0, transport="unix"))


RUNNERS = pytest.mark.parametrize("run", [step_by_iteration, step_by_latency, step_over_sockets])
#: The number of messages in a test. Most messages are sent before the matching receive is posted, some afterwards.
MESSAGES = 60


async def send_all(pg: ProcessGroup, n: int, seconds: float) -> None:
    """Send `MESSAGES` numbers to rank 1 in arrays of `n` elements, and cancel the awaits at various steps."""
    for number in range(MESSAGES):
        data = np.full(n, number, "f8")
        work = pg.send(data, 1)
        await cancel_after(asyncio.ensure_future(work.join()), number % 7, seconds)
        await pg.drain()
        assert work.is_success()
        for _ in range(number % 5):
            await asyncio.sleep(seconds)


@pytest.mark.parametrize("n", COUNTS)
@RUNNERS
def test_cancelled_receive_is_withdrawn_or_receives_its_message(run: Runner, n: int) -> None:
    async def rank(pg: ProcessGroup, seconds: float) -> None:
        if pg.rank() == 0:
            await send_all(pg, n, seconds)
            return
        got, withdrawn = 0, 0
        for steps in count():
            target = np.full(n, -1.0)
            work = pg.recv(target, 0)
            await cancel_after(asyncio.ensure_future(work.join()), steps % 9, seconds)
            if not work.done():
                await pg.drain()  # the receive has matched its message
            if isinstance(work.exception(), asyncio.CancelledError):
                assert (target == -1).all()
                withdrawn += 1
                await asyncio.sleep(seconds)
                continue
            assert (work.result() == got).all()
            got += 1
            if got == MESSAGES:
                break
        assert withdrawn > 0
        assert pg.pending() == []

    run(rank)


@RUNNERS
def test_cancelled_object_and_batch_receives_are_withdrawn(run: Runner) -> None:
    async def rank(pg: ProcessGroup, seconds: float) -> None:
        if pg.rank() == 0:
            for number in range(MESSAGES):
                await pg.batch([Send(np.array([number]), 1, 1)])
                await pg.send_object({"number": number}, 1, tag=2)
                await asyncio.sleep(seconds * (number % 3))
            return
        arrays, objects = 0, 0
        for steps in count():
            target = np.array([-1])
            works = [pg.batch([Recv(target, 0, 1)]), pg.recv_object(None, 2)]
            waiting = [asyncio.ensure_future(work.join()) for work in works]
            for _ in range(steps % 6):
                await asyncio.sleep(seconds)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            await pg.drain()
            for work in works:
                if not work.done():
                    await asyncio.wait([work.get_future()])
            if works[0].is_success():
                assert works[0].result() == [target] == [arrays]
                arrays += 1
            else:
                assert target == -1
            if works[1].is_success():
                assert works[1].result() == {"number": objects}
                objects += 1
            if arrays == objects == MESSAGES:
                return
            if arrays == MESSAGES or objects == MESSAGES:
                await asyncio.sleep(seconds)

    run(rank)


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(8))
@RUNNERS
def test_cancelled_incoming_iterator_loses_no_message(run: Runner, steps: int) -> None:
    """Receive a thousand messages of two lengths in a task that the test repeatedly cancels and restarts."""

    async def rank(pg: ProcessGroup, seconds: float) -> None:
        if pg.rank() == 0:
            for number in range(1000):
                pg.send_object(number if number % 50 else [number, bytes(300_000)], 1)
                if number % 10 == 0:
                    await pg.drain()
            await pg.drain()
            return
        messages = pg.incoming()
        got: list[int] = []

        async def take_messages() -> None:
            async for source, message in messages if steps % 2 else pg.incoming():
                assert source == 0
                got.append(message if isinstance(message, int) else message[0])

        for extra in count():
            if len(got) == 1000:
                break
            # Vary the step of the cancellation. Otherwise every receive might be cancelled before its message arrives.
            await cancel_after(asyncio.ensure_future(take_messages()), steps + extra % 2, seconds)
        assert got == list(range(1000))

    run(rank)


def test_several_tasks_can_iterate_over_incoming_messages() -> None:
    size, messages = 4, 100

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank():
            for number in range(messages):
                await pg.send_object(number, 0, tag=5)
                await asyncio.sleep(LATENCY * (number % 3))
            return
        incoming = pg.incoming(5)
        got: dict[int, list[int]] = {source: [] for source in range(1, size)}

        async def take_messages() -> None:
            while True:
                source, number = await anext(incoming)
                got[source].append(number)

        tasks = [asyncio.ensure_future(take_messages()) for _ in range(5)]
        for victim in count():
            if sum(map(len, got.values())) == messages * (size - 1):
                break
            await asyncio.sleep(LATENCY / 3)
            tasks[victim % 5].cancel()
            await asyncio.wait([tasks[victim % 5]])
            tasks[victim % 5] = asyncio.ensure_future(take_messages())
        assert all(numbers == list(range(messages)) for numbers in got.values())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert comm_of(pg).matching._listeners == {}

    run_virtual(size, rank, latency=(LATENCY / 10, LATENCY))
