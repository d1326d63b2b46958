"""A ported program that calls `dist.destroy_process_group` at the end of a block instead of by `atexit`."""

import asyncio
import contextlib

import aiocoll.distributed as dist


async def main() -> None:
    async with contextlib.AsyncExitStack() as at_exit:
        await dist.init_process_group()
        at_exit.push_async_callback(dist.destroy_process_group)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {await dist.all_reduce(dist.get_rank() + 1)}")


asyncio.run(main())
