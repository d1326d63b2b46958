"""Groups of ranks that are tasks of the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiocoll import GroupOptions, HashStore, ProcessGroup, new_group
from aiocoll.transport.memory import Hub

#: What `transport=` of `run_ranks` may be: within one loop "auto" means memory.
TRANSPORTS = ("memory", "unix", "tcp")


async def run_ranks(
    world_size: int,
    fn: Callable[..., Awaitable[Any]],
    *args: Any,
    transport: str = "memory",
    timeout: float = 30.0,
    **options: Any,
) -> list[Any]:
    """Run `fn(pg, *args)` on every rank; return the results in rank order, or raise the error that came first."""
    store = HashStore()
    chosen = GroupOptions(transport="auto" if transport == "memory" else transport, **options)  # type: ignore[arg-type]
    failures: list[BaseException] = []

    async def one(rank: int) -> Any:
        group = new_group(store=store, rank=rank, world_size=world_size, timeout=timeout, options=chosen)
        try:
            async with group as pg:
                return await fn(pg, *args)
        except Exception as error:
            failures.append(error)

    results = await asyncio.gather(*(one(rank) for rank in range(world_size)))
    await store.aclose()
    if failures:
        raise failures[0]
    return results


def hub(pg: ProcessGroup) -> Hub:
    """Return the network of a group in memory."""
    return pg._member.endpoint.transport._hub  # type: ignore[attr-defined]
