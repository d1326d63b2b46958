"""`spawn_ranks`: a decorator that runs a test on many ranks."""

from __future__ import annotations

import functools
import inspect
import sys
import unittest
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any

from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.testing.deaths import Death, check_deaths
from aiocoll.testing.frames import trim
from aiocoll.testing.loops import portable_loop
from aiocoll.testing.processes import run_team
from aiocoll.testing.ranks import check_call, run_ranks
from aiocoll.testing.skips import skip_early
from aiocoll.testing.team import Team

__all__ = ["spawn_ranks"]

#: Attribute that marks the functions which `spawn_ranks` returns. Their `__wrapped__` is the decorated function.
_SPAWNS = "__aiocoll_spawns__"


def spawn_ranks(
    world_size: int,
    *,
    processes: bool = False,
    timeout: float | timedelta | None = 120.0,
    options: GroupOptions | None = None,
    expect_death: Mapping[int, Death] | None = None,
    allow_unretrieved: bool = False,
) -> Callable[[Callable[..., Awaitable[object]]], Callable[..., Coroutine[Any, Any, None]]]:
    """Run the decorated ``async def test(pg, ...)``, or method, on `world_size` ranks each time it is awaited.

    Callers omit `pg`: every rank gets its own group, which is also its `current_process_group()`. So a test may do
    without the argument. The other arguments are the same on every rank. Any code that awaits tests may call it:
    pytest-asyncio, `unittest.IsolatedAsyncioTestCase`, another test. Put the skips of this package below it.

    Args:
        world_size: number of ranks.
        processes: make every rank a process. The test must then be importable: a method, or at the top of a module. Its
            arguments must be picklable, except a `unittest.TestCase`, which each rank makes again.
        timeout: seconds for everything; None waits forever.
        options: options of the groups.
        expect_death: ranks that must die, and how, as for `run_processes`; needs ``processes=True``.
        allow_unretrieved: as for `run_ranks`.

    Raises:
        The exceptions of `run_ranks` and `run_processes`.
    """
    if callable(world_size):
        raise TypeError("spawn_ranks needs the number of ranks: write @spawn_ranks(4)")
    check_call(world_size, spawn_ranks)
    if check_deaths(expect_death, world_size) and not processes:
        raise ValueError("expect_death: ranks that are tasks cannot die; add processes=True")

    def decorate(test: Callable[..., Awaitable[object]]) -> Callable[..., Coroutine[Any, Any, None]]:
        if not inspect.iscoroutinefunction(
            inspect.unwrap(test)
        ):  # unwrap, because `unittest.skip` wraps it in a plain function
            raise TypeError(f"spawn_ranks is for async tests: write `async def {getattr(test, '__name__', test)}`")
        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "pg"]
        visible = signature.replace(parameters=others)

        @functools.wraps(test)
        async def on_all_ranks(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            arguments = dict(visible.bind(*args, **kwargs).arguments)
            skip_early(world_size, test, *args[:1])
            try:
                if processes:
                    where = test.__module__, test.__qualname__
                    arguments = {name: _portable(value) for name, value in arguments.items()}
                    team = Team(
                        world_size,
                        test,
                        loop=portable_loop(None),
                        options=options,
                        expect_death=expect_death,
                        allow_unretrieved=allow_unretrieved,
                    )
                    await run_team(team, timeout, _in_process, where, arguments)
                else:
                    await run_ranks(
                        world_size,
                        _call,
                        test,
                        arguments,
                        timeout=timeout,
                        options=options,
                        allow_unretrieved=allow_unretrieved,
                    )
            except BaseException as error:
                raise trim(error)  # noqa: B904 - it is the same exception

        on_all_ranks.__signature__ = visible  # type: ignore[attr-defined]
        setattr(on_all_ranks, _SPAWNS, test)
        return on_all_ranks

    return decorate


async def _call(pg: ProcessGroup, test: Callable[..., Awaitable[object]], arguments: dict[str, Any]) -> None:
    signature = inspect.signature(test)
    given = {"pg": pg} if "pg" in signature.parameters else {}
    bound = signature.bind_partial()
    bound.arguments.update(arguments | given)
    await test(*bound.args, **bound.kwargs)


async def _in_process(pg: ProcessGroup, where: tuple[str, str], arguments: dict[str, Any]) -> None:
    found: Any = sys.modules[where[0]]
    for name in where[1].split("."):
        found = getattr(found, name)
    while not hasattr(found, "__dict__") or _SPAWNS not in vars(found):
        found = found.__wrapped__  # another decorator wraps the test
    arguments = {name: value() if isinstance(value, functools.partial) else value for name, value in arguments.items()}
    await _call(pg, vars(found)[_SPAWNS], arguments)


def _portable(value: Any) -> Any:
    """Return `value`; for a unittest test case, a factory that can be pickled, since its runner cannot."""
    return functools.partial(type(value), value._testMethodName) if isinstance(value, unittest.TestCase) else value
