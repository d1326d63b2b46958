"""A test process of one of two ranks on one device, which call NCCL through aiocoll.

``python -m tests.gpu.on_device.two aiocoll_rank HOW KIND FOLDER`` starts both ranks.
They fail if the machine does not support two ranks on one device.

sum        both ranks reduce arrays and shut the group down
killed     rank 1 kills itself while the kernel of rank 0 waits for it
aborted    rank 0 aborts while its kernel waits for rank 1, whose device is held up
mismatched rank 1 calls with fewer elements; both ranks launch the call before they compare it
crossed    the ranks call two groups in opposite orders, with and without keys; no call is staged
queued     more calls than a stream has room for, behind a kernel that holds them up
left       the process ends with an open group
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, GroupError, PeerLostError, ProcessGroup, new_group
from aiocoll.gpu.provider import provide, runtime

from ...internals import dispatcher_of, set_limits
from .base import lag_percentiles, late_wakeups
from .clocked import Clocked
from .two import PosingCuda
from .worlds import World, world

#: The element counts of the float32 arrays.
COUNTS = (1, 1000, 1 << 20)
ROUNDS = 20
#: The maximum time in seconds until a lost rank or an abort is reported. aiocoll promises 1 s; the rest is a margin for
#: the other process on the device.
SOON = 3.0
#: The timeout of a call in seconds, including the creation of the communicator.
TIMEOUT = 30.0
#: The number of calls in the `queued` mode. Each call enqueues a wait, a kernel and an event; a stream has room for
#: 1,024 entries.
QUEUED = 500
#: The maximum delay of the event loop in seconds.
LAG = 0.5


@contextmanager
def disguised_device(kind: str, rank: int) -> Iterator[World]:
    """Yield the device, with a different bus id on each rank, so that aiocoll uses NCCL."""
    with world(kind, stuck=True, processes=True) as made:  # NCCL may keep an aborted communicator
        cuda, nccl = runtime()
        assert nccl is not None, "NCCL is not available"
        with provide(PosingCuda(cuda, rank), Clocked(nccl)):  # type: ignore[arg-type]
            yield made


async def time_allreduce(pg: ProcessGroup, made: World, count: int) -> float:
    tensor = made.tensor(np.full(count, pg.rank() + 1, np.float32))
    start = perf_counter()
    await pg.allreduce(tensor)
    took = perf_counter() - start
    assert (made.host(tensor) == 3).all()
    return took


async def make_communicator(pg: ProcessGroup, made: World) -> None:
    """Create the communicator by a first allreduce, and check that the group uses NCCL."""
    start = perf_counter()
    await time_allreduce(pg, made, 1)
    assert dispatcher_of(pg).device_calls is not None
    assert dispatcher_of(pg).device_calls.state.decision is not None
    assert dispatcher_of(pg).device_calls.state.decision.native, dispatcher_of(pg).device_calls.state.decision.why
    print(f"rank {pg.rank()}: the first allreduce took {perf_counter() - start:.1f} s", flush=True)


async def make_sums(pg: ProcessGroup, made: World) -> None:
    for count in COUNTS:
        times = [await time_allreduce(pg, made, count) for _ in range(ROUNDS)]
        if pg.rank() == 0:
            us = round(median(times) * 1e6, 1)
            made.figure(f"allreduce of {4 * count} B by aiocoll, 2 ranks on 1 device: us p50", us)


async def start_held_up_call(pg: ProcessGroup, made: World) -> Any:
    """Make rank 0's kernel wait for rank 1; return the work on rank 0, and the gate of the blocked stream on rank 1."""
    tensor = made.tensor(np.ones(1000, np.float32))
    if pg.rank() == 0:
        work = pg.allreduce(tensor)
        await work.on_stream()
        await pg.send_object("it is on the device", 1)
        return work
    made.stream(0)
    gate = made.gate(0)
    pg.allreduce(tensor).add_done_callback(lambda work: work.exception())
    await pg.recv_object(0)
    return gate


async def check_failure(
    pg: ProcessGroup, work: Any, kind: type[GroupError], match: str, made: World, what: str
) -> None:
    start = perf_counter()
    with pytest.raises(kind, match=match):
        await work
    took = perf_counter() - start
    assert took < SOON, f"the failure took {took:.1f} s"
    made.figure(f"from {what} to its error on rank {pg.rank()}: ms", round(took * 1e3, 1))


async def kill_rank(pg: ProcessGroup, made: World) -> None:
    held = await start_held_up_call(pg, made)
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await check_failure(pg, held, PeerLostError, "rank 1", made, "kill -9 of rank 1")


async def abort_group(pg: ProcessGroup, made: World) -> None:
    held = await start_held_up_call(pg, made)
    if pg.rank() == 0:
        pg.abort("enough")
        await check_failure(pg, held, GroupError, "enough", made, "abort")
    else:
        assert "enough" in str(await pg.wait_revoked())
        held.open()


async def leave_open(pg: ProcessGroup, made: World) -> None:
    await time_allreduce(pg, made, 1000)


async def make_mismatch(pg: ProcessGroup, made: World) -> None:
    rank, (_, few, many) = pg.rank(), COUNTS
    for count in (
        few,
        few,
        many,
        many,
        few,
        few,
    ):  # repeated, so that later calls of both lengths are launched before they are compared
        await time_allreduce(pg, made, count)
    tensor = made.tensor(np.ones(few if rank else many, np.float32))
    clock = runtime()[1]
    assert isinstance(clock, Clocked)
    start = perf_counter()
    work = pg.allreduce(tensor)
    assert clock.last[rank] > start, "the call did not launch the allreduce at once"
    await check_failure(
        pg, work, CollectiveMismatchError, rf"(?s){many}.*{few}|{few}.*{many}", made, "a call that differs"
    )


async def cross_groups(pg: ProcessGroup, made: World) -> None:
    other = await pg.split_group([[0, 1]], group_name="other")
    assert other is not None
    groups, times = ((pg, other) if pg.rank() else (other, pg)), []
    for number in range(ROUNDS):
        calls = [
            (group, key) for key in (None, f"{number} a", f"{number} b")[: 1 + 2 * (number % 2)] for group in groups
        ]
        tensors = [made.tensor(np.full(1000, pg.rank() + 1, np.float32)) for _ in calls]
        start = perf_counter()
        works = [group.allreduce(each, key=key) for (group, key), each in zip(calls, tensors, strict=True)]
        await asyncio.gather(*(work.join() for work in works))
        times.append((perf_counter() - start) / len(calls))
        assert all((made.host(each) == 3).all() for each in tensors)
    posing = runtime()[0]
    assert isinstance(posing, PosingCuda)
    assert posing.staged == 0
    if pg.rank() == 0:
        made.figure("allreduces of two groups, in another order on each rank: us p50", round(median(times) * 1e6, 1))
    await other.shutdown()


async def queue_calls(pg: ProcessGroup, made: World) -> None:
    made.stream(0)
    tensor = made.tensor(np.full(1000, pg.rank() + 1.0))
    await pg.allreduce(tensor)
    gate = made.gate(0)  # make the gate after the first call, which loads its kernel
    async with late_wakeups() as late:
        start = perf_counter()
        works = [pg.allreduce(tensor) for _ in range(QUEUED)]
        called = perf_counter() - start
        await pg.barrier()
        assert not works[0].done()
        gate.open()
        for work in works:
            await work
    assert set(made.host(tensor)) == {3 * 2.0**QUEUED}
    assert max(called, *late) < LAG
    if pg.rank() == 0:
        made.figure(f"to call {QUEUED} allreduces in a row: us each", round(called / QUEUED * 1e6, 1))
        made.figure("loop lag meanwhile: ms p50, p99, max", lag_percentiles(late))


HOW = {
    "sum": make_sums,
    "killed": kill_rank,
    "aborted": abort_group,
    "mismatched": make_mismatch,
    "crossed": cross_groups,
    "queued": queue_calls,
    "left": leave_open,
}


async def body(how: str, kind: str, meeting: str, rank: int) -> None:
    with disguised_device(kind, rank) as made, pytest.MonkeyPatch.context() as patch:
        set_limits(patch, device_slot_wait=TIMEOUT)  # so that no call is staged because a rank is slow
        pg = await new_group(init_method=f"file://{meeting}/store", rank=rank, world_size=2, timeout=TIMEOUT)
        await make_communicator(pg, made)
        await HOW[how](pg, made)
        if how != "left":
            start = perf_counter()
            with suppress(GroupError):
                await pg.shutdown()
            made.figure(f"shutdown after {how}, rank {rank}: ms", round((perf_counter() - start) * 1e3, 1))
    print(f"rank {rank}: done", flush=True)


def main(how: str, kind: str, meeting: str, rank: str) -> None:
    asyncio.run(body(how, kind, meeting, int(rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
