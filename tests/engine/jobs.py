"""Functions that ranks of the pressure tests run, in a module that their processes can import."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aiocoll import ProcessGroup

from ..internals import clear_stall_reports, comm_of, early_bytes, unmade_groups

#: Message sizes of `flood` in bytes: short messages are sent eagerly, long messages need the receiver's permission.
SHORT, LONG = 64 * 1024, 1024 * 1024
#: Seconds that the slow rank sleeps before each message.
SLOW = 0.004


class Usage(NamedTuple):
    """The memory use of one rank: maximum of early bytes, growth of resident memory, and received bytes."""

    early: int
    resident: int
    received: int


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def unclaimed_bytes(pg: ProcessGroup) -> int:
    """Return the number of received bytes that no call on this rank has requested yet."""
    member = comm_of(pg)
    unmade = unmade_groups(pg).values()
    strangers = sum(len(payload) for group in unmade for _, _, payload in group.frames)
    messages = sum(len(part) for arrival in member.matching._active.values() for part in arrival.parts)
    return early_bytes(pg) + strangers + messages


async def flood(pg: ProcessGroup, seconds: float) -> Usage:
    """Let rank 0 send as fast as flow control allows, by sends and broadcasts, to rank 1, which receives slowly."""
    buffers = [np.full(size, 1, "uint8") for size in (SHORT, LONG, SHORT, LONG)]
    end = asyncio.get_running_loop().time() + seconds
    before = resident()
    used = Usage(0, 0, 0)

    async def send_until_end(way: int) -> None:
        buffer = buffers[way]
        while (continues := asyncio.get_running_loop().time() < end) or buffer[0]:
            buffer[0] = continues
            await (pg.send(buffer, 1, way) if way < 2 else pg.broadcast(buffer, 0, key=str(way)))

    async def receive_until_end(way: int) -> None:
        nonlocal used
        buffer = buffers[way]
        while buffer[0]:
            await asyncio.sleep(SLOW)
            await (pg.recv(buffer, 0, way) if way < 2 else pg.broadcast(buffer, 0, key=str(way)))
            used = Usage(
                max(used.early, unclaimed_bytes(pg)),
                max(used.resident, resident() - before),
                used.received + buffer.nbytes,
            )

    async with asyncio.TaskGroup() as tasks:
        for way in range(4):
            tasks.create_task((receive_until_end if pg.rank() else send_until_end)(way))
    await pg.barrier()
    return used._replace(resident=max(used.resident, resident() - before))


async def operate(pg: ProcessGroup, count: int) -> None:
    """Carry out `count` operations of all kinds, with about a hundred operations in flight at a time."""
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
    """Return the growth in memory blocks and bytes during `count` operations, after `warm` warm-up operations."""
    await operate(pg, warm)
    before = memory_in_use()
    await operate(pg, count)
    clear_stall_reports(pg)  # a rank that the machine has paused leaves records of stalls
    after = memory_in_use()
    return after[0] - before[0], after[1] - before[1]


def memory_in_use() -> tuple[int, int]:
    """Return the number of memory blocks in use, and the resident bytes."""
    gc.collect()
    return sys.getallocatedblocks(), resident()
