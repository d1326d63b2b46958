"""A rank that runs a documented recovery recipe. Arguments: "meets", "joins" or "shrinks"; when the rank dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import numpy as np

import aiocoll
from tests.pages import code, execute

WORLD_SIZE, STEPS = 4, 40
#: The number of steps after which the first rank dies.
HALF = 20

_, mode, death = sys.argv


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def step(pg: Any, state: dict[str, int]) -> None:
    """Count the ranks of the group in one step of the recipe, unless this rank dies in this step."""
    if death == "step" and state["step"] == HALF:
        die()
    count = await pg.allreduce(1)
    state["step"] += 1
    state["total"] = state.get("total", 0) + count


_shrink, _grow = aiocoll.ProcessGroup.shrink, aiocoll.ProcessGroup.grow


async def shrink(pg: aiocoll.ProcessGroup) -> aiocoll.ProcessGroup:
    """Shrink the group, unless this rank dies before or during the call."""
    if death == "shrink":
        die()
    shrinking = asyncio.ensure_future(_shrink(pg))
    if death == "shrinking":
        await asyncio.sleep(0)  # lets the loop send the request to the other ranks
        die()
    return await shrinking


def newcomer_exchanges(pg: aiocoll.ProcessGroup) -> int:
    """Return how often the ranks have exchanged their numbers of newcomers."""
    return sum(each.calls for each in pg.stats().operations if each.op == "ALLGATHER_OBJECT")


async def grow(pg: aiocoll.ProcessGroup, n: int) -> aiocoll.ProcessGroup:
    """Grow the group, unless this rank dies while it waits for newcomers or right after their arrival."""
    before = newcomer_exchanges(pg)
    growing = asyncio.ensure_future(_grow(pg, n))
    if death == "growing":
        # Wait until rank 0 waits for newcomers in the store, and the other ranks wait for the answer of rank 0.
        while newcomer_exchanges(pg) == before or (pg.rank() and not pg.pending()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        die()
    grown = await growing
    if death == "grown":
        die()
    return grown


async def run_reliability_recipe() -> dict[str, int]:
    last: dict[str, int] = {}

    async def step_and_record(pg: Any, state: dict[str, int]) -> None:
        await step(pg, state)
        last.update(state)

    recipe = code("docs/reliability.md", "Going on")
    names = await execute(recipe, aiocoll=aiocoll, WORLD_SIZE=WORLD_SIZE, STEPS=STEPS, step=step_and_record)
    while True:
        try:
            await names["main"](mode == "joins")
        except aiocoll.RendezvousError:
            if mode != "joins":
                raise
        else:
            return last


async def run_guide_recipe() -> dict[str, int]:
    sums = []

    def gradient(number: int) -> Any:
        if death == "step" and number == HALF:
            die()
        sums.append(np.array([number]))
        return sums[-1]

    recipe = code("docs/guide.md", "Recovery")
    names = await execute(recipe, aiocoll=aiocoll, STEPS=STEPS, gradient=gradient, pg=await aiocoll.new_group())
    size = names["pg"].size()
    await names["pg"].shutdown()
    return {"step": names["step"], "size": size, "last": int(sums[-1][0])}


if __name__ == "__main__":
    aiocoll.ProcessGroup.shrink, aiocoll.ProcessGroup.grow = shrink, grow  # type: ignore[method-assign,assignment]
    print(json.dumps(asyncio.run(run_guide_recipe() if mode == "shrinks" else run_reliability_recipe())))
