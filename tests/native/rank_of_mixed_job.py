"""A rank of a job with native and pure processes: `python -m tests.native.rank_of_mixed_job RANK SIZE PORT`.

It makes every call with every count and checks the results. It prints its implementation and the chunk size.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from aiocoll import GroupOptions, new_group
from aiocoll.native import IMPLEMENTATION
from tests.chaos.random_disturbances import CALLED, COUNTS
from tests.internals import comm_of


async def main(rank: int, size: int, port: int) -> None:
    options = GroupOptions(transport="shm", job_key=b"k" * 32)
    group = new_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=30, options=options)
    async with group as pg:
        for step, (call, count) in enumerate(itertools.product(CALLED, COUNTS)):
            await call(pg, count, step)
        comm = comm_of(pg)
        assert all(comm.channels[peer].shared is not None for peer in comm.others)
        print(IMPLEMENTATION, comm.chunk_nbytes)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
