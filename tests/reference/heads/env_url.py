"""A ported program that passes init_method="env://"."""

import asyncio

import aiocoll.distributed as dist


async def main() -> None:
    await dist.init_process_group(init_method="env://")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {await dist.all_reduce(dist.get_rank() + 1)}")
    await dist.destroy_process_group()


asyncio.run(main())
