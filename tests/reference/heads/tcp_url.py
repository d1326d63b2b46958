"""A ported program that passes a tcp:// URL, the rank and the world size: `python tcp_url.py PORT`."""

import asyncio
import os
import sys

import aiocoll.distributed as dist


async def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    await dist.init_process_group(init_method=f"tcp://localhost:{sys.argv[1]}", rank=rank, world_size=world_size)
    print(f"rank {rank} of {world_size}: {await dist.all_reduce(rank + 1)}")
    await dist.destroy_process_group()


asyncio.run(main())
