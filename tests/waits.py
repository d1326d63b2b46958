"""Ways to wait for a work, for tests that check each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiocoll import ProcessGroup, Work


async def _await(work: Work[Any]) -> Any:
    return await work


#: Functions that wait for a work of a group, by name.
WAITS: dict[str, Callable[[ProcessGroup, Work[Any]], Awaitable[Any]]] = {
    "await": lambda pg, work: _await(work),
    "future": lambda pg, work: work.get_future(),
    "wait for the future": lambda pg, work: asyncio.wait([work.get_future()]),
    "join": lambda pg, work: asyncio.create_task(work.join()),
    "wait for the join": lambda pg, work: asyncio.wait([asyncio.ensure_future(work.join())]),
    "thread": lambda pg, work: asyncio.to_thread(work.wait, 20),
    "drain": lambda pg, work: pg.drain(),
    "task": lambda pg, work: asyncio.create_task(_await(work)),
}
