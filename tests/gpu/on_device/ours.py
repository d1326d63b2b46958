"""One of two ranks on one device that call NCCL by aiocoll; fails, and never skips, where that is not possible.

``python -m tests.gpu.on_device.two ours HOW KIND FOLDER`` starts both.

sum        reduces arrays, and shuts the group down
killed     rank 1 kills itself while rank 0's kernel waits for it
aborted    rank 0 aborts while its kernel waits for rank 1, which is held up on its device
mismatched rank 1 calls with fewer elements; both ranks launch that before they compare it
crossed    each rank calls two groups in another order, with keys and without, and nothing is staged
queued     more calls than a stream has room for, behind a kernel that holds them up
left       ends without a word, the group still open
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
from .base import lag, naps
from .clocked import Clocked
from .two import Posing
from .worlds import World, world

#: Elements, of float32.
COUNTS = (1, 1000, 1 << 20)
ROUNDS = 20
#: Seconds in which a lost rank, or an abort, is heard of: the contract says one, the rest is for the other process,
#: with which this one shares the device.
SOON = 3.0
#: Seconds for a call, the making of the communicator included.
TIMEOUT = 30.0
#: Calls that are queued, each a wait, a kernel and an event: a stream has room for 1,024 of these.
QUEUED = 500
#: Seconds for which nothing may hold up the loop.
LAG = 0.5


@contextmanager
def placed(kind: str, rank: int) -> Iterator[World]:
    """Provide the device, as one of this rank alone."""
    with world(kind, stuck=True, processes=True) as made:  # perhaps: NCCL may not give back what is aborted
        cuda, nccl = runtime()
        assert nccl is not None, "there is no NCCL"
        with provide(Posing(cuda, rank), Clocked(nccl)):  # type: ignore[arg-type]
            yield made


async def reduced(pg: ProcessGroup, made: World, count: int) -> float:
    tensor = made.tensor(np.full(count, pg.rank() + 1, np.float32))
    start = perf_counter()
    await pg.allreduce(tensor)
    took = perf_counter() - start
    assert (made.host(tensor) == 3).all()
    return took


async def first(pg: ProcessGroup, made: World) -> None:
    """Make the communicator."""
    start = perf_counter()
    await reduced(pg, made, 1)
    assert dispatcher_of(pg).device_calls is not None
    assert dispatcher_of(pg).device_calls.state.decision is not None
    assert dispatcher_of(pg).device_calls.state.decision.native, dispatcher_of(pg).device_calls.state.decision.why
    print(f"rank {pg.rank()}: the first allreduce took {perf_counter() - start:.1f} s", flush=True)


async def sum_(pg: ProcessGroup, made: World) -> None:
    for count in COUNTS:
        times = [await reduced(pg, made, count) for _ in range(ROUNDS)]
        if pg.rank() == 0:
            us = round(median(times) * 1e6, 1)
            made.figure(f"allreduce of {4 * count} B by aiocoll, 2 ranks on 1 device: us p50", us)


async def waiting(pg: ProcessGroup, made: World) -> Any:
    """Let the kernel of rank 0 wait for that of rank 1; return its work. On rank 1, return what holds it up."""
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


async def fails(pg: ProcessGroup, work: Any, kind: type[GroupError], match: str, made: World, what: str) -> None:
    start = perf_counter()
    with pytest.raises(kind, match=match):
        await work
    took = perf_counter() - start
    assert took < SOON, f"it took {took:.1f} s"
    made.figure(f"from {what} to its error on rank {pg.rank()}: ms", round(took * 1e3, 1))


async def killed(pg: ProcessGroup, made: World) -> None:
    held = await waiting(pg, made)
    if pg.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await fails(pg, held, PeerLostError, "rank 1", made, "kill -9 of rank 1")


async def aborted(pg: ProcessGroup, made: World) -> None:
    held = await waiting(pg, made)
    if pg.rank() == 0:
        pg.abort("enough")
        await fails(pg, held, GroupError, "enough", made, "abort")
    else:
        assert "enough" in str(await pg.wait_revoked())
        held.open()


async def left(pg: ProcessGroup, made: World) -> None:
    await reduced(pg, made, 1000)


async def mismatched(pg: ProcessGroup, made: World) -> None:
    rank, (_, few, many) = pg.rank(), COUNTS
    for count in (few, few, many, many, few, few):  # of both it is known that either has followed them
        await reduced(pg, made, count)
    tensor = made.tensor(np.ones(few if rank else many, np.float32))
    clock = runtime()[1]
    assert isinstance(clock, Clocked)
    start = perf_counter()
    work = pg.allreduce(tensor)
    assert clock.last[rank] > start, "it was not launched at the call"
    await fails(pg, work, CollectiveMismatchError, rf"(?s){many}.*{few}|{few}.*{many}", made, "a call that differs")


async def crossed(pg: ProcessGroup, made: World) -> None:
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
    assert isinstance(posing, Posing)
    assert posing.staged == 0
    if pg.rank() == 0:
        made.figure("allreduces of two groups, in another order on each rank: us p50", round(median(times) * 1e6, 1))
    await other.shutdown()


async def queued(pg: ProcessGroup, made: World) -> None:
    made.stream(0)
    tensor = made.tensor(np.full(1000, pg.rank() + 1.0))
    await pg.allreduce(tensor)
    gate = made.gate(0)  # the first one loads its kernel
    async with naps() as late:
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
        made.figure("loop lag meanwhile: ms p50, p99, max", lag(late))


HOW = {
    "sum": sum_,
    "killed": killed,
    "aborted": aborted,
    "mismatched": mismatched,
    "crossed": crossed,
    "queued": queued,
    "left": left,
}


async def body(how: str, kind: str, meeting: str, rank: int) -> None:
    with placed(kind, rank) as made, pytest.MonkeyPatch.context() as patch:
        set_limits(patch, slot_patience=TIMEOUT)  # nothing is staged because a rank is slow
        pg = await new_group(init_method=f"file://{meeting}/store", rank=rank, world_size=2, timeout=TIMEOUT)
        await first(pg, made)
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
