"""Functions that wait for a work, one for each way to wait, for tests that check every way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiocoll import ProcessGroup, Work


async def _await(work: Work[Any]) -> Any:
    return await work


#: For each way to wait: a function that waits for a work of a group.
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
