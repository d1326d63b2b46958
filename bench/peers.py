"""One rank of one launch: times every size with one library and prints the times as JSON. Started by allreduce.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

#: Ones summed in place are powers of the world size: exact in float32, and finite for so many rounds on up to 16 ranks.
ROUNDS = 24
#: Periods of the test pattern: a prime, so that no block boundary falls on it.
PERIOD = 251


def main() -> None:
    config = json.loads(sys.argv[1])
    if config["peer"] == "gloo":
        result = gloo(config)
    else:
        import uvloop

        result = uvloop.run(aiocoll(config))
    json.dump(result, sys.stdout)


def pattern(count: int, factor: int) -> Array:
    return np.tile(np.arange(1, PERIOD + 1, dtype=np.float32) * factor, count // PERIOD + 1)[:count]


def wrong(x: Array, expected: Array | float) -> int:
    return int(np.count_nonzero(x != expected))


def blocks(iterations: int) -> Iterator[tuple[int, bool]]:
    """Yield the rounds until the array must start again from ones, and whether they count; the first do not."""
    yield min(ROUNDS, max(2, iterations // 10)), False
    while iterations > 0:
        yield min(ROUNDS, iterations), True
        iterations -= ROUNDS


async def aiocoll(config: dict[str, Any]) -> dict[str, Any]:
    from aiocoll import GroupOptions, new_group

    async with new_group(
        init_method=f"file://{os.getcwd()}/store",
        rank=config["rank"],
        world_size=config["world_size"],
        options=GroupOptions(transport=config["peer"], job_key=config["job_key"]),
    ) as pg:

        async def times(x: Array, rounds: int) -> list[int]:
            taken = []
            for _ in range(rounds):
                start = perf_counter_ns()
                await pg.allreduce(x)
                taken.append(perf_counter_ns() - start)
            return taken

        return await measure(config, times)


def gloo(config: dict[str, Any]) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.getcwd()}/store",
        rank=config["rank"],
        world_size=config["world_size"],
    )

    async def times(x: Array, rounds: int) -> list[int]:
        tensor = torch.from_numpy(x)
        taken = []
        for _ in range(rounds):
            start = perf_counter_ns()
            dist.all_reduce(tensor)
            taken.append(perf_counter_ns() - start)
        return taken

    result = asyncio.run(measure(config, times))
    dist.destroy_process_group()
    return result


async def measure(config: dict[str, Any], times: Callable[[Array, int], Awaitable[list[int]]]) -> dict[str, Any]:
    """Return the nanoseconds of every iteration and the wrong elements, by size."""
    rank, world_size = config["rank"], config["world_size"]
    taken: dict[int, list[int]] = {}
    wrongs: dict[int, int] = {}
    for nbytes, iterations in config["sizes"]:
        x = pattern(nbytes // 4, rank + 1)
        await times(x, 1)
        wrongs[nbytes] = wrong(x, pattern(x.size, world_size * (world_size + 1) // 2))
        taken[nbytes] = []
        for rounds, counts in blocks(iterations):
            x.fill(1)
            found = await times(x, rounds)
            wrongs[nbytes] += wrong(x, float(world_size) ** rounds)
            if counts:
                taken[nbytes] += found
    return {"nanoseconds": taken, "wrong": wrongs}


if __name__ == "__main__":
    main()
