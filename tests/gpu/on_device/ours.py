"""One of two ranks on one device that call NCCL by aiocoll; fails, and never skips, where that is not possible.

``python -m tests.gpu.on_device.two ours HOW KIND FOLDER`` starts both.

sum        reduces arrays, and shuts the group down
killed     rank 1 kills itself while rank 0's kernel waits for it
aborted    rank 0 aborts while its kernel waits for rank 1, which is held up on its device
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

from aiocoll import GroupError, PeerLostError, ProcessGroup, new_group
from aiocoll.gpu.provider import provide, runtime

from ...internals import dispatcher_of
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


@contextmanager
def placed(kind: str, rank: int) -> Iterator[World]:
    """Provide the device, as one of this rank alone."""
    with world(kind, stuck=True, processes=True) as made:  # perhaps: NCCL may not give back what is aborted
        cuda, nccl = runtime()
        assert nccl is not None, "there is no NCCL"
        with provide(Posing(cuda, rank), nccl):  # type: ignore[arg-type]
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
    assert dispatcher_of(pg).device_state is not None
    assert dispatcher_of(pg).device_state.decision is not None
    assert dispatcher_of(pg).device_state.decision.native, dispatcher_of(pg).device_state.decision.why
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


HOW = {"sum": sum_, "killed": killed, "aborted": aborted, "left": left}


async def body(how: str, kind: str, meeting: str, rank: int) -> None:
    with placed(kind, rank) as made:
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
