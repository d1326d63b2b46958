"""A rank that does not close its groups in five event loops; prints the descriptors and threads left by each loop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading

import numpy as np

import aiocoll

METHOD, RANK = sys.argv[1], int(sys.argv[2])


async def main() -> None:
    pg = await aiocoll.new_group(init_method=METHOD, rank=RANK, world_size=2, timeout=30)
    await pg.allreduce(np.ones(10))
    await pg.allreduce(np.ones(300_000))
    await pg.barrier()


found = []
for _ in range(5):
    asyncio.run(main())
    gc.collect()
    found.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
print(json.dumps(found))
