"""A rank of a pair that another user attacks, for `test_other_user`. Argument: a JSON description.

It prints its listener address, works until rank 0 reads a line, meets the other rank again, and prints the last sum.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from aiocoll import GroupOptions, ProcessGroup, TCPStore, new_group
from tests.internals import comm_of


def print_json(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def work(pg: ProcessGroup, stop_line: asyncio.Task[str] | None) -> float:
    while True:
        for count in (1, 100_000):
            array = await pg.allreduce(np.full(count, pg.rank() + 1.0))
            assert (array == 3).all()
        assert await pg.allgather_object(pg.rank()) == [0, 1]
        if await pg.broadcast(np.array(stop_line is not None and stop_line.done()), 0):
            return float(array[-1])
        await asyncio.sleep(0.005)


async def main(rank: int, method: str, transport: Any, folder: str) -> None:
    options = GroupOptions(transport=transport)
    stop_line = asyncio.create_task(asyncio.to_thread(sys.stdin.readline)) if rank == 0 else None
    async with AsyncExitStack() as stack:
        rendezvous: dict[str, Any] = {"init_method": method}
        if method.startswith("unix:"):
            # Use one store for both rendezvous: the second could otherwise use a store that the first is closing.
            rendezvous = {"store": await stack.enter_async_context(TCPStore(method, 0, is_master=rank == 0))}
        for first in (True, False):
            async with new_group(**rendezvous, rank=rank, world_size=2, timeout=30, options=options) as pg:
                if first:
                    pg.recorder.dump_json(f"{folder}/dump.{rank}")
                    card = comm_of(pg).endpoint.cards[rank]
                    print_json(card["unix"] or card["tcp"])
                total = await work(pg, stop_line)
    print_json(total)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
