"""A rank that runs the recipe of docs/reliability.md, *Going on*. Arguments: whether it joins, and where it dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiocoll

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
WORLD_SIZE, STEPS = 4, 40
#: After how many steps the first rank dies.
HALF = 20

_, joins, death = sys.argv


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


async def grow(pg: aiocoll.ProcessGroup, n: int) -> aiocoll.ProcessGroup:
    """Let the group grow, unless this rank dies while it waits for newcomers, or as soon as they have come."""
    growing = asyncio.ensure_future(_grow(pg, n))
    if death == "growing":
        said = "BROADCAST_OBJECT" if pg.rank() else "ALLGATHER_OBJECT"
        while [work.op for work in pg.pending()] != [said]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        while not pg.rank() and pg.pending():  # noqa: ASYNC110 - rank 0 asks next who has come
            await asyncio.sleep(0)
        die()
    grown = await growing
    if death == "grown":
        die()
    return grown


async def run() -> dict[str, int]:
    aiocoll.ProcessGroup.shrink, aiocoll.ProcessGroup.grow = shrink, grow  # type: ignore[method-assign,assignment]
    code = re.search(r"## Going on.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    last: dict[str, int] = {}

    async def noting(pg: Any, state: dict[str, int]) -> None:
        await step(pg, state)
        last.update(state)

    names = {"aiocoll": aiocoll, "WORLD_SIZE": WORLD_SIZE, "STEPS": STEPS, "step": noting}
    exec(compile(code[1], str(PAGE), "exec"), names)
    while True:
        try:
            await names["main"](joins == "joins")  # type: ignore[operator]
        except aiocoll.RendezvousError:
            if joins != "joins":
                raise
        else:
            return last


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run())))
