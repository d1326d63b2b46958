"""A ported program that reads its local rank from --local-rank, or else from the variable LOCAL_RANK."""

import argparse
import asyncio
import os

import aiocoll.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
arguments = parser.parse_args()


async def main() -> None:
    await dist.init_process_group()
    assert arguments.local_rank == dist.get_rank()
    total = await dist.all_reduce(arguments.local_rank + 1)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total}")
    await dist.destroy_process_group()


asyncio.run(main())
