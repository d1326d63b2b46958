"""Groups of ranks that are tasks of the test's own loop, over a transport the test names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from aiocoll import GroupOptions, ProcessGroup, testing
from aiocoll.transport.memory import Hub

from .internals import comm_of

#: What `transport=` of `run_ranks` may be: within one loop "auto" means memory.
TRANSPORTS = ("memory", "unix", "tcp", "shm")
#: A transport of each kind: objects handed over, a stream of bytes, shared memory. For tests of what is above them.
LINKS = ("memory", "unix", "shm")

Test = TypeVar("Test", bound=Callable[..., Any])


def options(transport: str) -> GroupOptions:
    """Return the options of a group over `transport`."""
    return GroupOptions(transport="auto" if transport == "memory" else transport)  # type: ignore[arg-type]


def over(*transports: Any) -> Callable[[Test], Test]:
    """Run a test that is marked with `ranks` over each of these transports, which `pytest.param` may mark."""

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
    """Run `fn(pg, *args)` on every rank; return the results in rank order, or raise the error that came first."""
    return await testing.run_ranks(
        world_size, fn, *args, options=options(transport), timeout=timeout, allow_unretrieved=allow_unretrieved
    )


def in_a_fork(call: Callable[[], object]) -> str:
    """Make a call in a forked child; return the error that it raises, or nothing."""
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


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds, which nothing else would tell."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def hub(pg: ProcessGroup) -> Hub:
    """Return the network of a group in memory."""
    return comm_of(pg).endpoint.context.transport._hub  # type: ignore[attr-defined]
