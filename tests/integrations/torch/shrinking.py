"""A rank of a torch program that calls `shrink_group`: `python -m tests.integrations.torch.shrinking CASE RANK FOLDER`.

Prints a line of JSON with the results of calls in the group of the ranks 0 and 2.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT, SHRINK_DEFAULT
from torch.nn.parallel import DistributedDataParallel

import aiocoll.torch
from aiocoll.integrations.torch.process import process

SIZE = 3
EXCLUDED = 1
#: The buffers and the works of messages that are pending while the group shrinks.
MESSAGES: list[torch.Tensor] = []
WORKS: list[dist.Work] = []


def leave_before(rank: int) -> int:
    """Let the excluded rank leave before the shrink, while a message from rank 2 to rank 0 is pending."""
    if rank == EXCLUDED:
        dist.destroy_process_group()
        sys.exit()
    if rank == 0:
        MESSAGES.append(torch.zeros(2))
        WORKS.append(dist.irecv(MESSAGES[0], 2))
    else:
        time.sleep(0.5)
        WORKS.append(dist.isend(torch.full((2,), 5.0), 0))
    return SHRINK_DEFAULT


def kill_before(rank: int) -> int:
    """Kill the excluded rank before the shrink, which makes a call of the other ranks fail."""
    if rank == EXCLUDED:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(dist.DistBackendError):
        dist.all_reduce(torch.ones(3))
    return SHRINK_ABORT


def kill_two_before(rank: int) -> int:
    """Kill rank 1, which is excluded, and rank 2, which is not."""
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(dist.DistBackendError):
        dist.all_reduce(torch.ones(3))
    return SHRINK_ABORT


def use(group: Any) -> dict[str, Any]:
    """Return the results of calls in `group`, the shrunk group, which is now torch's default group."""
    rank = dist.get_rank()
    total = torch.full((3,), rank + 1.0)
    dist.all_reduce(total)
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    message = torch.full((2,), 7.0 * (rank == 0))
    if rank == 0:
        dist.send(message, 1)
    else:
        dist.irecv(message, 0).wait()
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    pair = dist.new_group([1, 0], sort_ranks=False)
    first = torch.tensor([rank])
    dist.broadcast(first, 1, group=pair)
    return {
        "rank": [group.rank(), group.size(), rank, dist.get_world_size(), aiocoll.torch.group().size()],
        "total": total.tolist(),
        "gathered": torch.cat(gathered).tolist(),
        "objects": objects,
        "message": message.tolist(),
        "gradient": next(model.parameters()).grad.tolist(),
        "broadcast": [first.item(), type(pair).__name__],
    }


def mismatch() -> str:
    """Return the error text of an allreduce of tensors with different shapes."""
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except dist.DistBackendError as error:
        return str(error)
    return ""


def main(case: str, rank: int, folder: Path) -> None:
    """Run one case of `shrink_group`, and print the results as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "aio", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    dist.new_group([0, 2])  # torch destroys it when the default group shrinks
    found: dict[str, Any] = {"supported": dist.group.WORLD.supports_shrinking}
    if found["supported"]:
        try:
            dist.group.WORLD.shrink([EXCLUDED], SHRINK_DEFAULT, aiocoll.GroupOptions())
        except TypeError as error:
            found["options"] = str(error)
        dist.barrier()
        flags = globals()[case](rank)
        try:
            group = dist.shrink_group([EXCLUDED], shrink_flags=flags)
        except RuntimeError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        for work in WORKS:
            work.wait()
        found |= use(group) | {"mismatch": mismatch(), "pending": [each.tolist() for each in MESSAGES]}
        if dist.get_rank() == 0:
            again = torch.ones(2)
            dist.all_reduce(again, group=dist.shrink_group([1], shrink_flags=SHRINK_ABORT))
            found["again"] = again.tolist()
        dist.destroy_process_group()
        found["open"] = len(process.groups)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
