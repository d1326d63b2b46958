"""What the ranks of the tests under pressure run: a process has to import it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aiocoll import ProcessGroup

from ..internals import comm_of, early_bytes, forget_stalls, unmade_groups

#: Bytes of the messages of a flood: short ones that travel unasked, and long ones that are asked for.
SHORT, LONG = 64 * 1024, 1024 * 1024
#: Seconds the slow rank takes for each message.
SLOW = 0.004


class Used(NamedTuple):
    """What one rank has used: most bytes kept early, growth of its resident memory, bytes it has received."""

    early: int
    resident: int
    received: int


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def early(pg: ProcessGroup) -> int:
    """Return the bytes kept here of messages that no call has asked for."""
    member = comm_of(pg)
    unmade = unmade_groups(pg).values()
    strangers = sum(len(payload) for group in unmade for _, _, payload in group.frames)
    messages = sum(len(part) for arrival in member.matching._active.values() for part in arrival.parts)
    return early_bytes(pg) + strangers + messages


async def flood(pg: ProcessGroup, seconds: float) -> Used:
    """Rank 0 sends as fast as it is let, in several ways at once; rank 1 takes its time for each message."""
    buffers = [np.full(size, 1, "uint8") for size in (SHORT, LONG, SHORT, LONG)]
    end = asyncio.get_running_loop().time() + seconds
    before = resident()
    used = Used(0, 0, 0)

    async def feed(way: int) -> None:
        buffer = buffers[way]
        while (going := asyncio.get_running_loop().time() < end) or buffer[0]:
            buffer[0] = going
            await (pg.send(buffer, 1, way) if way < 2 else pg.broadcast(buffer, 0, key=str(way)))

    async def take(way: int) -> None:
        nonlocal used
        buffer = buffers[way]
        while buffer[0]:
            await asyncio.sleep(SLOW)
            await (pg.recv(buffer, 0, way) if way < 2 else pg.broadcast(buffer, 0, key=str(way)))
            used = Used(
                max(used.early, early(pg)), max(used.resident, resident() - before), used.received + buffer.nbytes
            )

    async with asyncio.TaskGroup() as tasks:
        for way in range(4):
            tasks.create_task((take if pg.rank() else feed)(way))
    await pg.barrier()
    return used._replace(resident=max(used.resident, resident() - before))


async def operate(pg: ProcessGroup, count: int) -> None:
    """Carry out `count` operations of every sort, some hundred in flight."""
    peer = 1 - pg.rank()
    small, large = np.zeros(16), np.zeros(2048)
    for number in range(0, count, 100):
        works = [pg.allreduce(small.copy(), timeout=60.0 + number % 2) for _ in range(30)]
        works += [pg.allreduce(large.copy(), key=f"layer{key}") for key in range(20)]
        works += [pg.broadcast(small, number // 100 % 2) for _ in range(10)]
        works += [pg.send(small, peer, tag) for tag in range(10)]
        works += [pg.recv(np.empty(16), peer, tag) for tag in range(10)]
        works += [
            pg.send_object({"number": number}, peer, number % 1_000_000),
            pg.recv_object(peer, number % 1_000_000),
        ]
        works += [pg.allgather_object(number) for _ in range(8)]
        works += [pg.barrier() for _ in range(10)]
        for work in works:
            await work


async def operate_long(pg: ProcessGroup, count: int, warm: int) -> tuple[int, int]:
    """Carry out `count` operations after `warm` others; return by how many objects and bytes the process has grown."""
    await operate(pg, warm)
    before = held()
    await operate(pg, count)
    forget_stalls(pg)  # the machine may have paused a rank
    after = held()
    return after[0] - before[0], after[1] - before[1]


def held() -> tuple[int, int]:
    """Return the number of blocks of memory in use, and the resident bytes."""
    gc.collect()
    return sys.getallocatedblocks(), resident()
