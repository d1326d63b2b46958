"""Delays of the event loop and of other threads during device work, measured and recorded."""

from __future__ import annotations

import asyncio
import threading
from statistics import median
from time import perf_counter

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.gpu.provider import runtime

from ...ranks import run_ranks
from ..groups import WAYS
from .base import lag_percentiles, late_wakeups
from .worlds import SIMULATED, World, world

both = pytest.mark.parametrize("way", WAYS)


@both
async def test_event_loop_is_not_blocked_during_a_long_kernel(kind: str, way: str) -> None:
    async def body(pg: ProcessGroup, made: World) -> None:
        device = pg.rank() % made.devices
        tensor = made.tensor(np.ones(1000), device)
        await pg.allreduce(tensor)
        async with late_wakeups() as late:
            made.delay(made.slow, device)
            start = perf_counter()
            work = pg.allreduce(tensor)
            called = perf_counter() - start
            await work
            took = perf_counter() - start
        assert took > made.slow * 0.9
        # If a callback waited for the device, the delay would be the duration of the kernel.
        assert max(called, *late) < made.slow / 2
        made.figure(f"loop lag under a kernel of {made.slow:g} s, {way}: ms p50, p99, max", lag_percentiles(late))
        made.figure(f"the call itself, {way}: us", round(called * 1e6, 1))

    with world(kind, way, 1) as made:
        made.stream(0)
        await run_ranks(1, body, made)


async def test_delay_between_the_end_of_device_work_and_the_end_of_its_await_is_measured(kind: str) -> None:
    turns = 20 if kind in SIMULATED else 200

    async def body(pg: ProcessGroup, made: World) -> None:
        tensor = made.tensor(np.zeros(1), 0)
        await pg.allreduce(tensor)
        cuda = runtime()[0]
        mark = cuda.event_create()

        async def time_to_notice(poll: bool) -> float:
            """Return the seconds from the end of device work to the end of an await, or of a polling loop."""
            gate = made.gate(0)
            work = pg.allreduce(tensor)
            await work.on_stream()
            cuda.event_record(mark, made.current(0))
            assert not work.done()
            gate.open()
            start = perf_counter()
            if poll:
                while not cuda.event_done(mark):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            else:
                await work
            took = perf_counter() - start
            await work
            return took

        whole, awaited, polled = [], [], []
        for _ in range(turns):
            start = perf_counter()
            await pg.allreduce(tensor)
            whole.append(perf_counter() - start)
            awaited.append(await time_to_notice(False))
            polled.append(await time_to_notice(True))
        cuda.event_destroy(mark)
        made.figure("allreduce of one element, awaited: us p50", round(median(whole) * 1e6, 1))
        made.figure("from the end on the device to the end of the await: us p50", round(median(awaited) * 1e6, 1))
        made.figure(
            "from there to the end of a loop that polls, a core of its own: us p50", round(median(polled) * 1e6, 1)
        )

    with world(kind, "nccl", 1) as made:
        made.stream(0)
        await run_ranks(1, body, made)


@both
async def test_other_threads_can_use_the_device_during_calls(kind: str, way: str) -> None:
    """Check that the GIL and CUDA's locks cause no deadlock while other threads call the runtime."""
    seconds = 0.2 if kind in SIMULATED else 8.0
    stop = threading.Event()
    pokes = [0] * 4

    async def body(pg: ProcessGroup, made: World) -> int:
        device = pg.rank() % made.devices
        tensor = made.tensor(np.zeros(1000), device)
        calls, end = 0, perf_counter() + seconds
        while calls < 5 or perf_counter() < end:
            for work in [pg.allreduce(tensor, key=f"{calls}/{number}") for number in range(4)]:
                await work
            calls += 1
            if calls % 5 == 0 and await pg.allreduce(int(perf_counter() >= end)):
                break
        return calls * 4

    def poke(number: int, made: World) -> None:
        while not stop.is_set():
            made.poke(number % made.devices)
            pokes[number] += 1

    with world(kind, way, 1) as made:
        threads = [threading.Thread(target=poke, args=(number, made)) for number in range(len(pokes))]
        for thread in threads:
            thread.start()
        try:
            (calls,) = await run_ranks(1, body, made)
        finally:
            stop.set()
            for thread in threads:
                thread.join(10.0)
        assert all(pokes)
        made.figure(f"{len(pokes)} threads poking for {seconds:g} s, {way}: calls, pokes", [calls, sum(pokes)])
