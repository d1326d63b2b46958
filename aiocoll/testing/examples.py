"""Tests with hypothesis' ``@given``: each example runs on all ranks, with the same drawn values.

As pytest-asyncio does, this module replaces the inner function, which hypothesis calls once per example.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.testing.frames import trim
from aiocoll.testing.loops import loop_of_fixtures
from aiocoll.testing.persistent_ranks import PersistentRanks
from aiocoll.testing.ranks import run_ranks, time_limit
from aiocoll.testing.skips import skip_early
from aiocoll.testing.team import pickled

__all__ = ["inner_test", "on_all_ranks"]

#: Timeout in seconds of one example on ranks that are processes, as in `run_processes`.
_TIMEOUT = 120.0


def inner_test(test: Any) -> Any:
    """Return the function that ``@given`` has decorated; `test` itself if it has no such decorator."""
    return test.hypothesis.inner_test if getattr(test, "is_hypothesis_test", False) else test


@contextmanager
def on_all_ranks(
    test: Any, world_size: int, fixtures: Mapping[str, Any], *, processes: bool = False, **how: Any
) -> Iterator[None]:
    """Run every example of `test` on all ranks until the end of the block.

    Args:
        test: the function that ``@given`` has made.
        world_size: number of ranks.
        fixtures: the arguments that are not drawn values.
        processes: whether ranks are processes, which serve all examples.
        how: the arguments of the mark.
    """
    inner = inner_test(test)
    names = list(inspect.signature(inner).parameters)
    owner = type(test.__self__) if inspect.ismethod(test) else None
    shared = {*fixtures} if owner is None else {*fixtures, names[0]}
    if processes:
        running = _processes(test, owner, world_size, loop=loop_of_fixtures(fixtures), **how)
    else:
        running = _tasks(inner, world_size, **how)
    with running as run:

        @functools.wraps(inner)
        async def run_example(*args: Any, **values: Any) -> None:
            __tracebackhide__ = True
            values |= zip(names, args, strict=False)
            _refuse_interactive(values)
            del values["pg"]
            skip_early(world_size, inner, owner)
            try:
                await run(values, {name: values.pop(name) for name in values.keys() - shared})
            except BaseException as error:
                raise trim(error)  # noqa: B904 - it is the same exception

        test.hypothesis.inner_test = run_example
        try:
            yield
        finally:
            test.hypothesis.inner_test = inner


#: A function that runs an example on all ranks. Its arguments are the values that ranks share, and the values that each
#: rank gets as a copy.
_Run = Callable[[dict[str, Any], dict[str, Any]], Awaitable[object]]


@contextmanager
def _tasks(inner: Callable[..., Any], world_size: int, **how: Any) -> Iterator[_Run]:
    async def run(shared: dict[str, Any], drawn: dict[str, Any]) -> None:
        await run_ranks(world_size, _on_task, inner, shared, drawn, **how)

    yield run


@contextmanager
def _processes(
    test: Any,
    owner: type | None,
    world_size: int,
    *,
    loop: str | bytes,
    options: GroupOptions | None = None,
    timeout: Any = _TIMEOUT,
    allow_unretrieved: bool = False,
) -> Iterator[_Run]:
    limit = time_limit(timeout)
    ranks = PersistentRanks(test, world_size, options=options, loop=loop, allow_unretrieved=allow_unretrieved)
    try:
        ranks.start()
        # Let the processes start before the first example, because hypothesis limits the time of an example.
        ranks.call(pickled(_meet, ()), limit)

        async def run(shared: dict[str, Any], drawn: dict[str, Any]) -> None:
            call = pickled(_in_process, (owner, test.__module__, test.__name__, shared | drawn))
            await asyncio.to_thread(ranks.call, call, limit)

        yield run
    finally:
        ranks.close()


async def _on_task(
    group: ProcessGroup, test: Callable[..., Any], shared: dict[str, Any], drawn: dict[str, Any]
) -> None:
    # Copy the values, because a rank may change them, as an allreduce does. Other ranks need the original values.
    await test(pg=group, **shared, **copy.deepcopy(drawn))


async def _meet(group: ProcessGroup) -> None:
    pass


async def _in_process(group: ProcessGroup, owner: type | None, module: str, name: str, values: dict[str, Any]) -> None:
    # The function is found by its name, because functions made by ``@given`` cannot be pickled.
    test = getattr(sys.modules[module] if owner is None else owner, name)
    await inner_test(test)(pg=group, **values)


def _refuse_interactive(values: dict[str, Any]) -> None:
    """Fail a test that uses `st.data()`, because the ranks would draw different values from it."""
    strategies = sys.modules["hypothesis.strategies"]
    for name, value in values.items():
        if isinstance(value, strategies.DataObject):
            pytest.fail(
                f"{name}: st.data() would draw a different value on each rank; draw by @given instead", pytrace=False
            )
