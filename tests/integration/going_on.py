"""A rank that runs a recipe of the docs. Arguments: meets, joins, or shrinks (as the guide does); where it dies."""

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
#: After how many steps the first rank dies.
HALF = 20

_, way, death = sys.argv


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def step(pg: Any, state: dict[str, int]) -> None:
    """Count the ranks; `WORLD_SIZE` of them take part in every step."""
    if death == "step" and state["step"] == HALF:
        die()
    count = await pg.allreduce(1)
    state["step"] += 1
    state["total"] = state.get("total", 0) + count


_shrink, _grow = aiocoll.ProcessGroup.shrink, aiocoll.ProcessGroup.grow


async def shrink(pg: aiocoll.ProcessGroup) -> aiocoll.ProcessGroup:
    """Shrink the group, unless this rank dies before that or in it."""
    if death == "shrink":
        die()
    shrinking = asyncio.ensure_future(_shrink(pg))
    if death == "shrinking":
        await asyncio.sleep(0)  # it has told the others
        die()
    return await shrinking


def asked(pg: aiocoll.ProcessGroup) -> int:
    """How often the ranks have told each other for how many newcomers they wait."""
    return sum(each.calls for each in pg.stats().operations if each.op == "ALLGATHER_OBJECT")


async def grow(pg: aiocoll.ProcessGroup, n: int) -> aiocoll.ProcessGroup:
    """Let the group grow, unless this rank dies while it waits for newcomers, or as soon as they have come."""
    before = asked(pg)
    growing = asyncio.ensure_future(_grow(pg, n))
    if death == "growing":
        # Rank 0 asks the store for newcomers next, the others ask rank 0 who has come.
        while asked(pg) == before or (pg.rank() and not pg.pending()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        die()
    grown = await growing
    if death == "grown":
        die()
    return grown


async def going_on() -> dict[str, int]:
    last: dict[str, int] = {}

    async def noting(pg: Any, state: dict[str, int]) -> None:
        await step(pg, state)
        last.update(state)

    recipe = code("docs/reliability.md", "Going on")
    names = await execute(recipe, aiocoll=aiocoll, WORLD_SIZE=WORLD_SIZE, STEPS=STEPS, step=noting)
    while True:
        try:
            await names["main"](way == "joins")
        except aiocoll.RendezvousError:
            if way != "joins":
                raise
        else:
            return last


async def shrinking() -> dict[str, int]:
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
    print(json.dumps(asyncio.run(shrinking() if way == "shrinks" else going_on())))
