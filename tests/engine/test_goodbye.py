"""Goodbyes of ranks that leave: data sent before a goodbye arrives, even if the goodbye arrives earlier."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from aiocoll import PeerLostError, ProcessGroup
from aiocoll.engine.job.context import Context
from aiocoll.testing.virtual import run_virtual

from ..internals import comm_of, observe_calls

#: Shortest and longest latency of a frame in seconds. Only frames of the same link stay in order: half of all goodbyes
#: on a control link arrive before earlier data on the data link.
LATENCY = (0.001, 0.5)
#: Array lengths in float64 elements: an array that fits into one frame, and an array of several frames.
COUNTS = (3, 30_000)


async def open_links(pg: ProcessGroup) -> None:
    """Open the links between all ranks."""
    await pg.alltoall_object([None] * pg.size())


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("ends", [False, True], ids=["leaves a group", "ends"])
def test_data_sent_before_a_goodbye_arrives(ends: bool, world_size: int, count: int) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        part: Any = pg if ends else await pg.split_group(range(world_size))
        me = pg.rank()
        if me:
            receives = [part.recv(np.zeros(count), source, 5) for source in range(me)]
            for source, work in enumerate(receives):
                assert (await work == source).all()
        # All messages are eager, so the sends complete before any message has arrived.
        sends = [part.send(np.full(count, float(me)), target, 5) for target in range(me + 1, world_size)]
        assert all(work.done() for work in sends)
        await part.shutdown()

    for seed in range(6):
        run_virtual(world_size, rank, seed=seed, latency=LATENCY)


def test_group_created_after_the_end_of_its_peer_receives_the_data_sent_before() -> None:
    """Let the notice about a rank's end arrive on the control link long before the rank's last data frames."""

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        if pg.rank():
            await asyncio.sleep(LATENCY[1] / 2)
        part: Any = await pg.split_group(range(2))
        if pg.rank():
            assert (await part.recv(np.zeros(3), 0, 5) == 7).all()
        else:
            assert part.send(np.full(3, 7.0), 1, 5).done()
        await part.shutdown()

    for seed in range(30):
        run_virtual(2, rank, seed=seed, latency=LATENCY)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_rank_can_leave_the_group_as_soon_as_it_has_its_result(world_size: int) -> None:
    """Let a rank finish a collective and leave while its last messages are still in flight."""

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        for count in COUNTS:
            part = await pg.split_group(range(world_size))
            assert part is not None
            got = await part.allgather(None, np.full(count, 1.0 + pg.rank()))
            assert [float(each[0]) for each in got] == [1.0 + rank for rank in range(world_size)]
            await part.shutdown()
        tensor = np.full(30_000, 2.0 ** pg.rank())
        await pg.allreduce(tensor)
        assert (tensor == 2.0**world_size - 1).all()

    for seed in range(6):
        run_virtual(world_size, rank, seed=seed, latency=LATENCY)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("ends", [False, True], ids=["leaves a group", "ends"])
def test_receive_from_a_rank_that_has_left_fails_after_its_data_has_arrived(ends: bool, world_size: int) -> None:
    """Let the last rank send one message and leave; the first receive gets the message, the second one fails."""

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        part: Any = pg if ends else await pg.split_group(range(world_size))
        last = world_size - 1
        if pg.rank() == last:
            await asyncio.gather(*(part.send(np.ones(3), peer) for peer in range(last)))
            await part.shutdown()
        else:
            works = [part.recv(np.zeros(3), last) for _ in range(2)]
            assert (await works[0] == 1).all()
            with pytest.raises(PeerLostError, match=f"needs rank {last}, which has left"):
                await works[1]
        if not ends:
            await pg.barrier()  # keeps the remaining ranks until the goodbye has reached all of them

    for seed in range(6):
        run_virtual(world_size, rank, seed=seed, latency=LATENCY)


@pytest.mark.parametrize("world_size", [2, 3])
def test_closing_the_last_group_of_a_rank_sends_no_goodbye(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the notice of a rank's end replaces the goodbye."""
    sent: list[str] = []
    observe_calls(monkeypatch, send_control_message=lambda _, message: sent.append(message["t"]))

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        part: Any = await pg.split_group(range(world_size))
        await part.barrier()
        await part.shutdown()
        await pg.barrier()
        assert sent.count("bye") >= world_size - 1
        await pg.barrier()
        sent.clear()
        await pg.barrier()
        await pg.shutdown()

    run_virtual(world_size, rank)
    assert "bye" not in sent
    assert sent


@pytest.mark.ranks(2)
async def test_background_task_runs_until_its_endpoint_stops(pg: ProcessGroup) -> None:
    """Check that a background task is referenced, since the event loop keeps only weak references to tasks."""
    context = Context(comm_of(pg).runtime, comm_of(pg).endpoint.context.transport, 0, 1)
    ended = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    context.spawn(wait(), "a test")
    await asyncio.sleep(0)
    gc.collect()
    assert not ended
    await context.stop_tasks()
    assert ended
