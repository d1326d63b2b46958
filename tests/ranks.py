"""Groups of ranks that are tasks of the test's loop, over a transport that the test names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from aiocoll import GroupOptions, HashStore, ProcessGroup, Recv, Send, new_group, testing
from aiocoll.transport.memory import Hub

from .internals import comm_of

#: Transports for `run_ranks`. Within one loop, "auto" means memory.
TRANSPORTS = ("memory", "unix", "tcp", "shm")
#: One transport of each kind (object queue, byte stream, shared memory), for tests of higher layers.
LINKS = ("memory", "unix", "shm")

Test = TypeVar("Test", bound=Callable[..., Any])


def options(transport: str) -> GroupOptions:
    """Return the options of a group over `transport`."""
    return GroupOptions(transport="auto" if transport == "memory" else transport)  # type: ignore[arg-type]


def parametrize_transports(*transports: Any) -> Callable[[Test], Test]:
    """Run a test marked with `ranks` over each of these transports, which may be a `pytest.param` with marks."""

    def decorate(test: Test) -> Test:
        parametrized = pytest.mark.parametrize("transport", transports, indirect=True)(test)
        return pytest.mark.usefixtures("transport")(parametrized)

    return decorate


async def run_ranks(
    world_size: int,
    fn: Callable[..., Awaitable[Any]],
    *args: Any,
    transport: str = "memory",
    timeout: float = 60.0,
    allow_unretrieved: bool = False,
) -> list[Any]:
    """Run `fn(pg, *args)` on every rank; return the results in rank order, or raise the first error."""
    return await testing.run_ranks(
        world_size, fn, *args, options=options(transport), timeout=timeout, allow_unretrieved=allow_unretrieved
    )


async def check_group(pg: ProcessGroup) -> tuple[int, ...]:
    """Check that all data arrives at the right ranks of a group; return its global ranks."""
    rank, size = pg.rank(), pg.size()
    for count in (1, 100_000):
        tensor = np.full(count, 2.0**rank)
        await pg.allreduce(tensor)
        assert (tensor == 2.0**size - 1).all()
        parts = await pg.allgather(None, np.full(count, rank))
        assert [int(part[-1]) for part in parts] == list(range(size))
    right, left = (rank + 1) % size, (rank - 1) % size
    got = np.zeros(3, int)
    await pg.batch([Send(np.full(3, rank), right), Recv(got, left)])
    assert (got == left).all()
    assert (await pg.broadcast(np.full(5, rank), root=size - 1) == size - 1).all()
    assert await pg.allgather_object((pg.group_name, pg.global_ranks)) == [(pg.group_name, pg.global_ranks)] * size
    return pg.global_ranks


def run_in_fork(call: Callable[[], object]) -> str:
    """Make a call in a forked child; return the text of its error, or an empty string."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException as error:
            os.write(into, str(error).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        raised = pipe.read().decode()
    os.waitpid(child, 0)
    return raised


async def wait_until(condition: Callable[[], object]) -> None:
    """Run the loop until `condition` holds, where no event reports it."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def hub_of(pg: ProcessGroup) -> Hub:
    """Return the in-process network of a group."""
    return comm_of(pg).endpoint.context.transport._hub  # type: ignore[attr-defined]


async def run_in_two_groups(
    body: Callable[[ProcessGroup, ProcessGroup], Awaitable[Any]], transport: str = "memory"
) -> list[Any]:
    """Run `body(one, two)` on each of two ranks, which share two groups; return the results in rank order."""
    store = HashStore()

    async def rank(number: int) -> Any:
        where: dict[str, Any] = {"store": store, "rank": number, "world_size": 2, "options": options(transport)}
        async with new_group(**where) as one, new_group(**where) as two:
            return await body(one, two)

    try:
        return await asyncio.gather(rank(0), rank(1))
    finally:
        await store.aclose()
