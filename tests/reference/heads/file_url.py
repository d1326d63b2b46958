"""A ported program that passes a file:// URL: `python file_url.py PORT`; the file name contains the port."""

import asyncio
import os
import sys
import tempfile

import aiocoll.distributed as dist


async def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = f"{tempfile.gettempdir()}/head-{sys.argv[1]}"
    await dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=world_size)
    print(f"rank {rank} of {world_size}: {await dist.all_reduce(rank + 1)}")
    await dist.destroy_process_group()


asyncio.run(main())
