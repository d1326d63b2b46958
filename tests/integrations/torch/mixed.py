"""A rank of a group with several torch backends: `python -m tests.integrations.torch.mixed BACKENDS RANK FOLDER`.

The backend "recorder" carries meta tensors: it records the calls and moves no data. The rank prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiocoll.torch  # noqa: F401

SIZE = 2


class Done(dist.Work):  # type: ignore[misc]
    """A torch work that has already finished."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Recorder(dist.ProcessGroup):  # type: ignore[misc]
    """A backend that records the names of its calls."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.name = ""
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            return lambda *args, **kwargs: self.calls.append(name) or Done()
        return super().__getattribute__(name)

    def getGroupName(self) -> str:
        return self.name

    def setGroupName(self, name: str) -> None:
        self.name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def setGroupDesc(self, desc: str) -> None:
        pass

    _set_group_desc = setGroupDesc

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def call_all(x: torch.Tensor, other: int) -> None:
    """Make one torch call of each kind."""
    many, flat = [torch.empty_like(x) for _ in range(SIZE)], torch.cat([x] * SIZE)
    root = dist.get_rank() == 0
    dist.all_reduce(x)
    dist.reduce(x, 0)
    dist.broadcast(x, 0)
    dist.all_gather(many, x)
    dist.all_gather_into_tensor(flat, x)
    dist.gather(x, many if root else None)
    dist.scatter(x, many if root else None)
    dist.reduce_scatter(x, many)
    dist.reduce_scatter_tensor(x, flat)
    dist.all_to_all([torch.empty_like(x) for _ in range(SIZE)], many)
    dist.all_to_all_single(torch.empty_like(flat), flat)
    if root:
        dist.send(x, other)
    else:
        dist.recv(x, other)


CALLS = ("allreduce", "reduce", "broadcast", "allgather", "_allgather_base", "gather", "scatter", "reduce_scatter",
         "_reduce_scatter_base", "alltoall", "alltoall_base", "send", "recv", "all_gather_single",
         "reduce_scatter_single", "all_to_all_single")  # fmt: skip


def error_of(call: Callable[[], Any]) -> str:
    """Return the class and text of the exception that `call` raises, or "none" if it succeeds."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(backends: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.Backend.register_backend("recorder", Recorder, devices=["meta"])
    dist.init_process_group(backends, init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    group = dist.group.WORLD
    found: dict[str, Any] = {"devices": [each.type for each in group._device_types]}
    x = torch.full((2,), rank + 1.0)
    found["cpu"] = error_of(lambda: dist.all_reduce(x))
    found["total"] = x.tolist()
    found["meta"] = error_of(lambda: call_all(torch.empty(2, device="meta"), 1 - rank))
    gathered: list[Any] = [None] * SIZE
    found["objects"] = error_of(lambda: dist.all_gather_object(gathered, rank))
    found["gathered"] = gathered
    others = [each for each in dist.distributed_c10d._world.pg_map if isinstance(each, Recorder)]
    if "gloo" in backends and "cpu:aio" in backends:
        found["backend of CUDA tensors"] = type(group._get_backend(torch.device("cuda"))).__name__
    dist.destroy_process_group()
    found["calls"] = others[0].calls if others else []
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
