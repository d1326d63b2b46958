"""Decorators that skip a test if its world size, GPUs or modules do not suffice.

    @pytest.mark.ranks(1, 2, 7)
    @skip_if_world_smaller_than(2)
    async def test_ring(pg): ...

Put them directly on the ``async def`` test, below the decorator that makes the ranks, or on a test case class. The
decorator above checks them before it starts ranks. A test without such a decorator checks them on each rank.
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
#: A function that takes a world size, and returns the reason why the test cannot run, or None.
Check = Callable[[int], str | None]

_CHECKS = "__aiocoll_checks__"


def skip_if_world_smaller_than(n: int) -> Callable[[T], T]:
    """Skip the test on fewer than `n` ranks.

    Args:
        n: number of ranks.
    """
    return _make_decorator(lambda size: f"needs at least {n} ranks, the world has {size}" if size < n else None)


def skip_if_world_is_odd() -> Callable[[T], T]:
    """Skip the test on an odd number of ranks."""
    return _make_decorator(lambda size: f"needs an even number of ranks, the world has {size}" if size % 2 else None)


def requires_gpu(n: int | None = None) -> Callable[[T], T]:
    """Skip the test if this process may use fewer than `n` CUDA devices.

    The number comes from the driver, so no package has to be installed.

    Args:
        n: number of devices; None means one per rank.
    """

    def check(world_size: int) -> str | None:
        needed = world_size if n is None else n
        found = _gpus()
        return f"needs {needed} CUDA devices, there are {found}" if found < needed else None

    return _make_decorator(check)


def requires_module(*names: str) -> Callable[[T], T]:
    """Skip the test if one of these modules cannot be imported.

    Args:
        *names: names of modules, such as "torch".
    """

    def check(world_size: int) -> str | None:
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                return f"needs {name}: {error}"
        return None

    return _make_decorator(check)


def skip_early(world_size: int, *holders: object) -> None:
    """Raise `unittest.SkipTest` if a skip decorator on one of `holders` (tests or classes) applies."""
    for holder in holders:
        for check in getattr(holder, _CHECKS, ()):
            if reason := check(world_size):
                raise unittest.SkipTest(reason)


def _make_decorator(check: Check) -> Callable[[T], T]:
    def decorate(test: Any) -> Any:
        if not isinstance(test, type):
            if not inspect.iscoroutinefunction(test):
                raise TypeError(
                    f"{test!r} must be an `async def` test or a class of such tests: put the skip directly above one"
                )
            test = _wrap_test(test)
        setattr(test, _CHECKS, (check, *getattr(test, _CHECKS, ())))
        return test

    return decorate


def _wrap_test(test: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(test, _CHECKS, None):
        return test  # the existing wrapper runs the checks of all skip decorators

    @functools.wraps(test)
    async def check_first(*args: Any, **kwargs: Any) -> Any:
        group = current_process_group()
        if group is None:
            raise RuntimeError(
                f"{test.__qualname__} was not called on a rank; put its skips below the decorator that makes the ranks"
            )
        skip_early(group.size(), check_first)
        return await test(*args, **kwargs)

    return check_first


@functools.cache
def _gpus() -> int:
    from aiocoll.gpu.provider import driver_devices

    return driver_devices()
