"""`run_processes`: every rank in its own process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, TypeVarTuple, overload

from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.runtime import running_loop
from aiocoll.testing.deaths import Death
from aiocoll.testing.loops import portable_loop
from aiocoll.testing.ranks import check_call, time_limit
from aiocoll.testing.team import Team, pickled

__all__ = ["run_processes", "run_team"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@overload
async def run_processes(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] | None = None,
    expect_death: None = None,
    allow_unretrieved: bool = False,
) -> list[R]: ...


@overload
async def run_processes(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] | None = None,
    expect_death: Mapping[int, Death],
    allow_unretrieved: bool = False,
) -> list[R | Death]: ...


async def run_processes(
    world_size: int,
    fn: Callable[[ProcessGroup, *Ts], Awaitable[R]],
    *args: *Ts,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] | None = None,
    expect_death: Mapping[int, Death] | None = None,
    allow_unretrieved: bool = False,
) -> list[Any]:
    """Run ``await fn(pg, *args)`` on `world_size` ranks, each in a new process of this machine. Not on Windows.

    In each process, `current_process_group()` is its group, and the environment is as under ``aiocoll run``. Output
    goes to the output of this process. No process is left when this returns or raises.

    Args:
        world_size: number of ranks.
        fn: function that every rank runs. It must be picklable, so it cannot be a lambda or local function. The same
            holds for `args` and the results.
        args: further arguments.
        options: options of the groups.
        timeout: seconds for everything, including the start of the processes, times `AIOCOLL_TEST_TIMEOUT_SCALE`; None
            waits forever.
        loop: the event loop of the ranks; None means the class of the loop that runs here.
        expect_death: ranks that must die, and how: ``{2: signal.SIGKILL}``, or an exit code, ``{2: 7}``. Such a death
            is not a failure. Any other end of that rank is one.
        allow_unretrieved: a rank may return without having retrieved the failure of a call, as for `run_ranks`.

    Returns:
        The results of `fn` in rank order; for a rank that was expected to die, its death.

    Raises:
        TimeoutError: some ranks did not end; the message has the stacks of their tasks and their pending operations.
        ChildProcessError: a process ended too early, or not in the expected way; the message has its rank and its exit
            code or signal.
        AssertionError: a failure was never retrieved, as for `run_ranks`.
        BaseException: the exception of the first rank that failed. Its notes have that rank, the traceback there and
            the failures of others. An exception that cannot be pickled becomes a `RuntimeError` with its text.
    """
    running_loop()
    check_call(world_size, fn)
    team = Team(
        world_size,
        fn,
        loop=portable_loop(loop),
        options=options,
        expect_death=expect_death,
        allow_unretrieved=allow_unretrieved,
    )
    return await run_team(team, timeout, fn, *args)


async def run_team(
    team: Team, timeout: float | timedelta | None, fn: Callable[..., Awaitable[R]], *args: Any
) -> list[Any]:
    """Start the processes of `team`, and run `fn` on its ranks as `run_processes` does."""
    limit, call = time_limit(timeout), pickled(fn, args)
    async with team:
        return await team.carry_out(call, limit)
