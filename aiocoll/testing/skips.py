"""Decorators that skip a test, with the reason, where it cannot run.

    @pytest.mark.ranks(1, 2, 7)
    @skip_if_world_smaller_than(2)
    async def test_ring(pg): ...

They belong directly on the ``async def`` test, below the decorator that makes the ranks, or on a test case class. That
decorator checks them first; a test that runs without it checks them on each rank.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from aiocoll.group.current import current_process_group

__all__ = [
    "requires_gpu",
    "requires_module",
    "skip_early",
    "skip_if_world_is_odd",
    "skip_if_world_smaller_than",
]

T = TypeVar("T", bound=Callable[..., Any])
#: From a world size to the reason why the test cannot run, or None.
Check = Callable[[int], str | None]

_CHECKS = "__aiocoll_checks__"


def skip_if_world_smaller_than(n: int) -> Callable[[T], T]:
    """Skip the test on fewer than `n` ranks.

    Args:
        n: number of ranks.
    """
    return _requirement(lambda size: f"needs at least {n} ranks, the world has {size}" if size < n else None)


def skip_if_world_is_odd() -> Callable[[T], T]:
    """Skip the test on an odd number of ranks."""
    return _requirement(lambda size: f"needs an even number of ranks, the world has {size}" if size % 2 else None)


def requires_gpu(n: int | None = None) -> Callable[[T], T]:
    """Skip the test on a machine with fewer CUDA devices that this process may use.

    The driver is asked, so no package has to be installed.

    Args:
        n: number of devices; None is one for each rank.
    """

    def check(world_size: int) -> str | None:
        needed = world_size if n is None else n
        found = _gpus()
        return f"needs {needed} CUDA devices, there are {found}" if found < needed else None

    return _requirement(check)


def requires_module(*names: str) -> Callable[[T], T]:
    """Skip the test if one of these modules cannot be imported.

    Args:
        *names: of modules, such as "torch".
    """

    def check(world_size: int) -> str | None:
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                return f"needs {name}: {error}"
        return None

    return _requirement(check)


def skip_early(world_size: int, *holders: object) -> None:
    """Raise `unittest.SkipTest` if a decorator on one of `holders` says that the test cannot run."""
    for holder in holders:
        for check in getattr(holder, _CHECKS, ()):
            if reason := check(world_size):
                raise unittest.SkipTest(reason)


def _requirement(check: Check) -> Callable[[T], T]:
    def decorate(test: Any) -> Any:
        if not isinstance(test, type):
            if not inspect.iscoroutinefunction(test):
                raise TypeError(
                    f"{test!r} must be an `async def` test or a class of them: put this decorator next to it"
                )
            test = _checked(test)
        setattr(test, _CHECKS, (check, *getattr(test, _CHECKS, ())))
        return test

    return decorate


def _checked(test: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(test, _CHECKS, None):
        return test  # it checks them all already

    @functools.wraps(test)
    async def ask_first(*args: Any, **kwargs: Any) -> Any:
        group = current_process_group()
        if group is None:
            raise RuntimeError(
                f"{test.__qualname__} was not called on a rank: put its skips below the decorator that makes the ranks"
            )
        skip_early(group.size(), ask_first)
        return await test(*args, **kwargs)

    return ask_first


@functools.cache
def _gpus() -> int:
    from aiocoll.gpu.provider import driver_devices

    return driver_devices()
