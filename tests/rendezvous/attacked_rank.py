"""A rank for `test_stranger_soak`: prints its listener addresses and the durations of its allreduces or meetings.

Arguments: "work" or "meet", the rank, the host and port of the store, the transport, and the seconds to run. Lines of
standard output: "at FAMILY ADDRESS" for each listener; "took BEGIN SECONDS" for 50 allreduces of 64 KiB, or a meeting.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time

import numpy as np

from aiocoll import GroupOptions, ProcessGroup, new_group
from aiocoll.store import PrefixStore, TCPStore
from aiocoll.transport.stream import addresses as address

KEY = b"k" * 32
CALLS = 50


def print_line(*words: object) -> None:
    print(*words, flush=True)


def print_listeners() -> None:
    add = address.Listeners.add

    def add_and_print(self: address.Listeners, listener: socket.socket) -> None:
        add(self, listener)
        print_line("at", int(listener.family), repr(listener.getsockname()))

    address.Listeners.add = add_and_print  # type: ignore[method-assign]


async def work(pg: ProcessGroup, seconds: float) -> None:
    tensor = np.zeros(8192)
    end = time.monotonic() + seconds
    while await pg.broadcast(np.array([time.monotonic() < end]), 0):
        begin = time.monotonic()
        for _ in range(CALLS):
            await pg.allreduce(tensor)
        print_line("took", begin, time.monotonic() - begin)


async def main(what: str, rank: int, host: str, port: int, transport: str, seconds: float) -> None:
    print_listeners()
    options = GroupOptions(transport=transport, job_key=KEY)
    if what == "work":
        async with (
            TCPStore(host, port, key=KEY) as store,
            new_group(store=store, rank=rank, world_size=2, timeout=60, options=options) as pg,
        ):
            await work(pg, seconds)
        return
    end = time.monotonic() + seconds
    number, more = 0, True
    while more:
        begin = time.monotonic()
        async with TCPStore(host, port, key=KEY) as store:
            numbered_store = PrefixStore(str(number), store)
            async with new_group(store=numbered_store, rank=rank, world_size=2, timeout=60, options=options) as pg:
                await pg.allreduce(np.zeros(8192))
                print_line("took", begin, time.monotonic() - begin)
                more = bool((await pg.broadcast(np.array([time.monotonic() < end]), 0))[0])
        number += 1


if __name__ == "__main__":
    what, rank, host, port, transport, seconds = sys.argv[1:]
    asyncio.run(main(what, int(rank), host, int(port), transport, float(seconds)))
