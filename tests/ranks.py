"""Groups for tests: all ranks are tasks of one event loop, over the transport that the test chooses."""

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

#: Transports for `run_ranks`. "memory" stands for the option "auto", which uses memory within one event loop.
TRANSPORTS = ("memory", "unix", "tcp", "shm")
#: One transport of each kind (object queue, byte stream, shared memory), for tests of higher layers.
LINKS = ("memory", "unix", "shm")

Test = TypeVar("Test", bound=Callable[..., Any])


def options(transport: str) -> GroupOptions:
    """Return group options that select `transport`."""
    return GroupOptions(transport="auto" if transport == "memory" else transport)  # type: ignore[arg-type]


def parametrize_transports(*transports: Any) -> Callable[[Test], Test]:
    """Run a test marked with `ranks` once over each transport; a transport may be a `pytest.param`."""

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
    """Check the results of several calls in a group; return the global ranks of the group."""
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
    """Call a function in a forked child process; return its error text, or "" if the call succeeds."""
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
    """Poll `condition` in every loop iteration until it is true, for at most 20 s."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def hub_of(pg: ProcessGroup) -> Hub:
    """Return the hub that connects the ranks of a group over the transport "memory"."""
    return comm_of(pg).endpoint.context.transport._hub  # type: ignore[attr-defined]


async def run_in_two_groups(
    body: Callable[[ProcessGroup, ProcessGroup], Awaitable[Any]], transport: str = "memory"
) -> list[Any]:
    """Run `body(one, two)` on two ranks that are both in the groups `one` and `two`; return the results by rank."""
    store = HashStore()

    async def rank(number: int) -> Any:
        where: dict[str, Any] = {"store": store, "rank": number, "world_size": 2, "options": options(transport)}
        async with new_group(**where) as one, new_group(**where) as two:
            return await body(one, two)

    try:
        return await asyncio.gather(rank(0), rank(1))
    finally:
        await store.aclose()
