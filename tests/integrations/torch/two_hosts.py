"""A rank of a torch program on two hosts: `python -m tests.integrations.torch.two_hosts RANK ADDRESS`.

It prints a line of JSON: the sum over the ranks, and the length of the job key in torch's store.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import aiocoll.torch  # noqa: F401


def main(rank: int, address: str) -> None:
    store = dist.TCPStore(address, 29500, 2, rank == 0, timedelta(seconds=30))
    dist.init_process_group("aio", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    (key,) = [store.get(name) for name in store.list_keys() if name.endswith("aiocoll/key")]
    print(json.dumps({"total": total.item(), "key length": len(key)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
