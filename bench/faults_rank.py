"""A rank of faults.py: it reduces arrays until a peer is lost, then prints the time and the error.

It prints lines of JSON, and ends when its standard input does: a rank that ended earlier would be a second fault.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np

#: Number of operations that must succeed before a rank reports that the fault may happen.
WARM = 20


def main() -> None:
    config = json.loads(sys.argv[1])
    if config["library"] == "gloo":
        gloo(config)
        os._exit(0)  # its threads wait for a peer that never returns
    import uvloop

    uvloop.run(aiocoll(config))


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def aiocoll(config: dict[str, Any]) -> None:
    from aiocoll import GroupError, GroupOptions, GroupRevokedError, new_group

    pg = await new_group(
        init_method=f"file://{os.getcwd()}/store",
        rank=config["rank"],
        world_size=config["world_size"],
        options=GroupOptions(transport=config["transport"], job_key=config["job_key"]),
    )
    x = np.zeros(config["nbytes"] // 4, np.float32)
    for _ in range(WARM):
        await pg.allreduce(x)
    report(ready=True)
    try:
        while True:
            await pg.allreduce(x)
    except GroupError as error:
        at = time.monotonic()
        cause = error.__cause__ if isinstance(error, GroupRevokedError) else error
        report(at=at, error=type(cause).__name__, text=str(cause))
    if config["shrink"]:
        smaller = await pg.shrink()
        assert await smaller.allreduce(1) == config["world_size"] - 1
        report(shrunk=time.monotonic() - at)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # the time to leave the group is not measured here


def gloo(config: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    limit = {} if config["timeout"] is None else {"timeout": timedelta(seconds=config["timeout"])}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.getcwd()}/store",
        rank=config["rank"],
        world_size=config["world_size"],
        **limit,
    )
    x = torch.zeros(config["nbytes"] // 4)
    for _ in range(WARM):
        dist.all_reduce(x)
    report(ready=True)
    try:
        while True:
            dist.all_reduce(x)
    except RuntimeError as error:
        report(at=time.monotonic(), error=type(error).__name__, text=str(error))
    sys.stdin.read()


if __name__ == "__main__":
    main()
