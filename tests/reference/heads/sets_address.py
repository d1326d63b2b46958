"""A ported program that sets MASTER_ADDR and MASTER_PORT itself: `python sets_address.py PORT`."""

import asyncio
import os
import sys

import aiocoll.distributed as dist


async def main() -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    await dist.init_process_group()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {await dist.all_reduce(dist.get_rank() + 1)}")
    await dist.destroy_process_group()


asyncio.run(main())
