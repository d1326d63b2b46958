"""Hello from every rank: aiocoll run -n 2 examples/hello.py

Each rank contributes an array and its name; all ranks print the sum and all names.
"""

import asyncio

import numpy as np

import aiocoll


async def main() -> None:
    """Sum an array over the ranks, and gather their names."""
    async with aiocoll.new_group() as pg:  # meets the other ranks
        x = np.full(3, pg.rank() + 1.0)
        work = pg.allreduce(x)  # starts at the call
        names = await pg.allgather_object(f"rank {pg.rank()}")
        print(await work, names)  # x itself, now the sum


asyncio.run(main())
