"""Skips of tests: their conditions, the moment of the check, and their reasons."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from aiocoll import ProcessGroup
from aiocoll.testing import (
    requires_gpu,
    requires_module,
    run_ranks,
    skip_if_world_is_odd,
    skip_if_world_smaller_than,
    skips,
)
from aiocoll.testing.skips import skip_early

from ..internals import replace_parts


def no_devices() -> int:
    return 0


@pytest.mark.parametrize(
    ("skip", "world_size", "reason"),
    [
        (skip_if_world_smaller_than(3), 2, "needs at least 3 ranks, the world has 2"),
        (skip_if_world_smaller_than(3), 3, None),
        (skip_if_world_is_odd(), 1, "needs an even number of ranks, the world has 1"),
        (skip_if_world_is_odd(), 2, None),
        (requires_gpu(), 2, "needs 2 CUDA devices, there are 0"),
        (requires_gpu(1), 2, "needs 1 CUDA devices, there are 0"),
        (requires_module("json", "no_such_module"), 1, "needs no_such_module: No module named 'no_such_module'"),
        (requires_module("json"), 1, None),
    ],
)
async def test_skip_reason_names_the_requirement_that_is_not_met(
    skip: Any, world_size: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_parts(monkeypatch, gpu_count=no_devices)
    ran = []

    @skip
    async def test(pg: ProcessGroup) -> None:
        ran.append(pg.rank())

    if reason is None:
        skip_early(world_size, test)
        await run_ranks(world_size, test)
        assert sorted(ran) == list(range(world_size))
        return
    with pytest.raises(unittest.SkipTest) as early:
        skip_early(world_size, test)
    with pytest.raises(unittest.SkipTest) as on_a_rank:
        await run_ranks(world_size, test)
    assert str(early.value) == str(on_a_rank.value) == reason
    assert not ran


async def test_skip_decorators_combine_and_do_not_change_the_test() -> None:
    async def bare(pg: ProcessGroup) -> None: ...

    test = skip_if_world_smaller_than(2)(skip_if_world_is_odd()(bare))
    assert (test.__name__, test.__wrapped__) == ("bare", bare)  # type: ignore[attr-defined]
    for size, reason in {1: "at least 2", 3: "an even number"}.items():
        with pytest.raises(unittest.SkipTest, match=reason):
            skip_early(size, test)
    await run_ranks(2, test)


def test_subclass_inherits_the_skips_of_its_base_class() -> None:
    @skip_if_world_is_odd()
    class Base: ...

    @skip_if_world_smaller_than(3)
    class Derived(Base): ...

    with pytest.raises(unittest.SkipTest, match="an even number"):
        skip_early(3, Derived)
    with pytest.raises(unittest.SkipTest, match="at least 3"):
        skip_early(2, Derived)
    skip_early(2, Base)


def test_device_skip_depends_on_the_devices_of_the_machine() -> None:
    assert skips._gpus() >= 0


async def test_error_explains_a_misplaced_skip_decorator() -> None:
    with pytest.raises(TypeError, match="must be an `async def` test or a class of such tests"):
        skip_if_world_is_odd()(lambda pg: None)

    @skip_if_world_is_odd()
    async def test() -> None: ...

    with pytest.raises(RuntimeError, match="was not called on a rank; put its skips below the decorator"):
        await test()
