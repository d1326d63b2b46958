"""A rank on one of several hosts. Argument: what to do; everything else is in the environment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import numpy as np

import aiocoll


def tell(what: Any) -> None:
    """Print a line for the test."""
    print(json.dumps(what), flush=True)


def where() -> dict[str, Any]:
    """Return what `new_group` is to know."""
    method = os.environ["METHOD"]
    numbers = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    timeout = float(os.environ.get("TIMEOUT", "60"))
    return {"init_method": method, **numbers, "timeout": timeout}


async def total(pg: aiocoll.ProcessGroup) -> Any:
    """Return a sum, and where peers find this rank."""
    result = await pg.allreduce(np.full(1000, pg.rank() + 1.0))
    return float(result[0]), float(result[-1])


async def main(what: str) -> None:
    """Do it, and tell the result."""
    async with aiocoll.new_group(**where()) as pg:
        tell(await globals()[what](pg))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
