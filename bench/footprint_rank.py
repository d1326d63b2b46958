"""A rank of footprint.py: it meets the other ranks, opens a link with each of them, then idles for a while.

Before each step it waits for a line on its standard input. It prints its measurements, one line of JSON per step.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from aiocoll import GroupOptions, ProcessGroup, Recv, Send, new_group

#: Constants of <linux/fcntl.h>. Outboxes have this seal; link regions do not have it.
GET_SEALS, SEAL_FUTURE_WRITE = 1034, 0x0010


def main() -> None:
    uvloop.run(rank(**json.loads(sys.argv[1])))


async def rank(transport: str, job_key: str, idle: float) -> None:
    await step(resident=resident())
    entered, used = time.monotonic(), time.process_time()
    async with new_group(options=GroupOptions(transport=transport, job_key=job_key)) as pg:
        formed, cpu = time.monotonic(), time.process_time() - used
        await step(entered=entered, formed=formed, cpu=cpu, resident=resident())
        await link(pg)
        await step(resident=resident())
        used, began = time.process_time(), time.monotonic()
        await asyncio.sleep(idle)
        await step(share=(time.process_time() - used) / (time.monotonic() - began))


async def step(**seen: Any) -> None:
    """Print measurements, then wait until the parent starts the next step."""
    print(json.dumps(seen), flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        sys.exit("the benchmark has ended early")


def resident() -> int:
    """Return the bytes of memory that this rank costs: private memory, its outbox, and half of each link region.

    Shared memory counts as far as it is reserved, even if only the peer uses it. A peer's outbox counts at the peer.
    From Python 3.13 on, a mapping keeps no descriptor, so the reserved bytes are unknown.
    """
    nbytes = int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:aiocoll" in line]
    written = {int(inode) for _, mode, _, _, inode, *_ in mappings if mode.startswith("rw")}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself is closed already
            status = os.fstat(fd)
            if status.st_ino in written:
                written.remove(status.st_ino)
                reserved = status.st_blocks * 512
                nbytes += reserved if fcntl.fcntl(fd, GET_SEALS) & SEAL_FUTURE_WRITE else reserved // 2
    return nbytes


async def link(pg: ProcessGroup) -> None:
    """Open a link with every other rank, by sending a byte to each."""
    peers = [rank for rank in range(pg.size()) if rank != pg.rank()]
    byte = np.zeros(1, np.uint8)
    await pg.batch([*(Send(byte, peer) for peer in peers), *(Recv(np.empty(1, np.uint8), peer) for peer in peers)])


if __name__ == "__main__":
    main()
