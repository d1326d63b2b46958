"""A program that attaches torch groups to an aiocoll group of its own event loop, on two ranks.

`attached.py FOLDER` writes the results of each rank to FOLDER/RANK.json.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import aiocoll
import aiocoll.torch


def train(rank: int) -> dict[str, Any]:
    """Train one step with DDP, use a subgroup and the store, and return the results."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model)
    ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad is not None
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = torch.ones(1)
    dist.all_reduce(single, group=alone)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from {rank}", f"value {rank}")
    return {
        "gradient": model.weight.grad.tolist(),
        "sum over itself": single.item(),
        "value": store.get(f"from {1 - rank}").decode(),
    }


async def error_of(call: Callable[[], Coroutine[Any, Any, Any]]) -> str:
    """Return the class and text of the exception that `call` raises, or "none" if it succeeds."""
    try:
        await call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


async def enter(pg: aiocoll.ProcessGroup) -> None:
    async with aiocoll.torch.attach(pg):
        pass


async def reduce_on_the_loop(pg: aiocoll.ProcessGroup) -> None:
    async with aiocoll.torch.attach(pg):
        dist.all_reduce(torch.ones(1))


async def fail_in_a_thread(pg: aiocoll.ProcessGroup) -> None:
    async with aiocoll.torch.attach(pg):
        await asyncio.to_thread(dist.all_reduce, torch.ones(1 + pg.rank()))


async def raise_an_error(pg: aiocoll.ProcessGroup) -> None:
    async with aiocoll.torch.attach(pg):
        raise RuntimeError("of the program")


async def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    async with aiocoll.new_group() as pg:
        rank = pg.rank()
        async with aiocoll.torch.attach(pg) as group:
            training = asyncio.create_task(asyncio.to_thread(train, rank))
            found["names"] = await pg.allgather_object(f"rank {rank}", key="names")
            found |= await training
            found["same group"] = aiocoll.torch.group() is pg and aiocoll.torch.group(group) is pg
            half = await pg.split_group([rank], local=True)
            assert half is not None
            found["other size"] = await error_of(lambda: enter(half))
            async with aiocoll.torch.attach(pg) as second:
                total = torch.tensor([rank + 1.0])
                await asyncio.to_thread(dist.all_reduce, total, group=second)
                found["total of a second group"] = total.item()
            await half.shutdown()
        found["initialized after the block"] = dist.is_initialized()
        found["total after the block"] = (await pg.allreduce(torch.tensor([rank + 1.0]))).item()
        found["on the loop"] = await error_of(lambda: reduce_on_the_loop(pg))
        found["in the block"] = await error_of(lambda: raise_an_error(pg))
        found["mismatch"] = await error_of(lambda: fail_in_a_thread(pg))
        found["failed"] = await error_of(lambda: enter(pg))
    found["closed"] = await error_of(lambda: enter(pg))
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
