"""`run_processes`: every rank in a process of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, TypeVarTuple, overload

from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions, seconds
from aiocoll.runtime import running_loop
from aiocoll.testing.deaths import Death
from aiocoll.testing.ranks import check_call
from aiocoll.testing.team import Team, pickled

__all__ = ["run_processes", "run_test_processes"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@overload
async def run_processes(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] = "asyncio",
    expect_death: None = None,
) -> list[R]: ...


@overload
async def run_processes(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] = "asyncio",
    expect_death: Mapping[int, Death],
) -> list[R | Death]: ...


async def run_processes(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] = "asyncio",
    expect_death: Mapping[int, Death] | None = None,
) -> list[Any]:
    """Run ``await fn(pg, *args)`` on `world_size` ranks, each in a new process of this machine. Not on Windows.

    In each, `current_process_group()` is its group, and the environment is as under ``aiocoll run``. Their output is
    this process's. No process is left when this returns or raises.

    Args:
        world_size: number of ranks.
        fn: what every rank runs; like `args` and the results it must be picklable, so it cannot be a lambda or local.
        args: further arguments.
        options: of the groups.
        timeout: seconds for everything, the start of the processes included; None waits for ever.
        loop: the event loop of the ranks.
        expect_death: ranks that must die, and how: ``{2: signal.SIGKILL}``, or an exit code, ``{2: 7}``. That is then
            no failure, but to end in any other way is one.

    Returns:
        What `fn` returned, in rank order; of a rank that was expected to die, how it did.

    Raises:
        TimeoutError: some ranks did not end; the message has the stacks of their tasks and their pending operations.
        ChildProcessError: a process ended before its time, or not in the way that was expected; the message has its
            rank and its exit code or signal.
        BaseException: what `fn` raised on the first rank that failed. Its notes have that rank, its traceback there
            and the failures of others. An exception that cannot be pickled is a `RuntimeError` with its text.
    """
    return await run_test_processes(
        fn, world_size, fn, *args, options=options, timeout=timeout, loop=loop, expect_death=expect_death
    )


async def run_test_processes(
    source: Any,
    world_size: int,
    fn: Callable[..., Awaitable[R]],
    *args: Any,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: str = "asyncio",
    expect_death: Mapping[int, Death] | None = None,
) -> list[Any]:
    """Do what `run_processes` does; every rank imports the module of `source`, which is among `args`."""
    running_loop()
    check_call(world_size, fn)
    limit = seconds(timeout, "timeout")
    call = pickled(fn, args)
    async with Team(world_size, source, options=options, loop=loop, deaths=expect_death) as team:
        return await team.carry_out(call, limit)
