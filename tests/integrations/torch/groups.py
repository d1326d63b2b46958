"""Groups of a torch program with three ranks, started by torchrun or by `aiocoll run`.

`groups.py FOLDER` writes the results of each rank to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocoll.torch
from aiocoll import GroupOptions


def use_pair(rank: int) -> dict[str, Any]:
    """Make a group of ranks 2 and 0, in this order, without rank 1; return the results of two collectives."""
    pair = dist.new_group([2, 0], use_local_synchronization=True, sort_ranks=False)
    broadcast = torch.full((2,), rank)
    dist.broadcast(broadcast, 2, group=pair)
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([rank]), group=pair)
    return {
        "rank in pair": dist.get_rank(pair),
        "broadcast": broadcast.tolist(),
        "gathered": torch.cat(gathered).tolist(),
        "global ranks": dist.get_process_group_ranks(pair),
    }


def use_options(rank: int) -> dict[str, Any]:
    """Make a group that compares calls before it sends data; return its mismatch error and a later sum."""
    compared = dist.new_group(pg_options=GroupOptions(debug="detail"))
    found: dict[str, Any] = {}
    try:
        dist.all_reduce(torch.ones(3 + rank), group=compared)
    except dist.DistBackendError as error:
        found["cause"] = type(error.__cause__).__name__
    total = torch.ones(3)
    dist.all_reduce(total, group=compared)
    found["total after the mismatch"] = total.tolist()
    try:
        dist.new_group(pg_options="tcp")
    except TypeError as error:
        found["wrong options"] = str(error)
    return found


def use_timeout() -> dict[str, Any]:
    """Set the timeout of a torch group; return the timeout of its aiocoll group before and after."""
    timed = dist.new_group(timeout=timedelta(seconds=7))
    before = aiocoll.torch.group(timed).timeout
    timed.set_timeout(timedelta(seconds=2.5))
    return {"timeouts": [before, aiocoll.torch.group(timed).timeout]}


def gather_in_one_tensor(rank: int) -> dict[str, Any]:
    """Gather into one tensor on rank 1 through `gather_single`, the method that torch 2.14 calls."""
    options = dist.GatherOptions()
    options.rootRank = 1
    output = torch.zeros(6 if rank == 1 else 0)
    dist.group.WORLD.gather_single(output, torch.full((2,), float(rank)), options).wait()
    return {"gathered in one tensor": output.tolist()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("aio", timeout=timedelta(seconds=60), pg_options=GroupOptions(warn_after=20))
    rank = dist.get_rank()
    found = use_options(rank) | use_timeout() | gather_in_one_tensor(rank)
    if rank != 1:  # last: after it, torch 2.14 gives groups of all ranks different names on rank 1, over Gloo, too
        found |= use_pair(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
