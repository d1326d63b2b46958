"""A ported program that reads RANK, WORLD_SIZE and LOCAL_RANK, and passes rank and world size as arguments."""

import asyncio
import os

import aiocoll.distributed as dist


async def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert int(os.environ["LOCAL_RANK"]) == dist.get_node_local_rank()
    await dist.init_process_group(rank=rank, world_size=world_size)
    print(f"rank {rank} of {world_size}: {await dist.all_reduce(rank + 1)}")
    await dist.destroy_process_group()


asyncio.run(main())
