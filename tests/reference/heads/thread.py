"""A ported program whose thread reads rank and world size directly, and makes calls through the event loop."""

import asyncio
import threading

import aiocoll.distributed as dist


async def total(value: int) -> int:
    return await dist.all_reduce(value)


def work(loop: asyncio.AbstractEventLoop) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    result = asyncio.run_coroutine_threadsafe(total(rank + 1), loop).result()
    print(f"rank {rank} of {world_size}: {result}")


async def main() -> None:
    await dist.init_process_group()
    thread = threading.Thread(target=work, args=(asyncio.get_running_loop(),))
    thread.start()
    await asyncio.to_thread(thread.join)
    await dist.destroy_process_group()


asyncio.run(main())
