"""A ported program that starts its ranks by torch.multiprocessing.spawn: `python spawns.py PORT`."""

import asyncio
import os
import sys

import torch.multiprocessing

import aiocoll.distributed as dist

WORLD_SIZE = 2


async def main(rank: int) -> None:
    await dist.init_process_group(rank=rank, world_size=WORLD_SIZE)
    print(f"rank {rank} of {WORLD_SIZE}: {await dist.all_reduce(rank + 1)}", flush=True)
    await dist.destroy_process_group()


def work(rank: int, port: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    asyncio.run(main(rank))


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=WORLD_SIZE)
