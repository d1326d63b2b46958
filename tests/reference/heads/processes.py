"""A ported program that starts its ranks by multiprocessing.Process: `python processes.py PORT`."""

import asyncio
import multiprocessing
import os
import sys

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
    ranks = [multiprocessing.Process(target=work, args=(rank, sys.argv[1])) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in ranks))
