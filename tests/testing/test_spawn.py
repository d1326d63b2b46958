"""`spawn_ranks`: one call that runs many ranks."""

from __future__ import annotations

import inspect
import os
import unittest
from typing import Any

import pytest

from aiocoll import GroupOptions, ProcessGroup, current_process_group
from aiocoll.testing import skip_if_world_smaller_than, spawn_ranks


@spawn_ranks(3)
async def test_pytest_awaits_a_test_with_spawned_ranks(pg: ProcessGroup) -> None:
    assert await pg.allreduce(pg.rank()) == 3


@pytest.mark.parametrize("x", [5])
@spawn_ranks(2, options=GroupOptions(transport="tcp"))
async def test_spawned_test_receives_fixtures_as_its_other_arguments(
    x: int, pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(monkeypatch, pytest.MonkeyPatch)
    assert await pg.allreduce(x) == 10


def test_error_explains_missing_parentheses_of_spawn_ranks() -> None:
    with pytest.raises(TypeError, match=r"spawn_ranks needs the number of ranks: write @spawn_ranks\(4\)"):
        spawn_ranks(test_pytest_awaits_a_test_with_spawned_ranks)  # type: ignore[arg-type]


class TestMethod:
    @spawn_ranks(2)
    async def test_spawned_test_method_receives_self(self, pg: ProcessGroup) -> None:
        assert isinstance(self, TestMethod)
        await pg.barrier()

    @spawn_ranks(2)
    async def test_spawned_rank_has_a_current_group(self) -> None:
        group = current_process_group()
        assert group is not None
        assert group.size() == 2


class TestUnittest(unittest.IsolatedAsyncioTestCase):
    @spawn_ranks(2, processes=True)
    async def test_spawned_ranks_can_be_processes(self, pg: ProcessGroup) -> None:
        assert self._testMethodName == "test_spawned_ranks_can_be_processes"
        assert os.getppid() not in await pg.allgather_object(os.getpid())


async def test_spawn_ranks_passes_arguments_to_the_decorated_function() -> None:
    seen: list[Any] = []

    @spawn_ranks(1)
    async def take(x: int, pg: ProcessGroup, *, key: str, y: int = 3) -> None:
        seen.append((x, pg.size(), key, y))

    await take(1, key="k")
    await take(x=2, y=4, key="l")
    assert seen == [(1, 1, "k", 3), (2, 1, "l", 4)]
    assert list(inspect.signature(take).parameters) == ["x", "key", "y"]
    with pytest.raises(TypeError, match=r"missing a required (keyword-only )?argument: 'key'"):
        await take(1)


async def test_skips_below_spawn_ranks_are_checked_before_ranks_start() -> None:
    @spawn_ranks(2)
    @skip_if_world_smaller_than(3)
    async def small(pg: ProcessGroup) -> None:
        raise AssertionError

    with pytest.raises(unittest.SkipTest, match="at least 3 ranks"):
        await small()


def test_error_names_a_wrong_use_of_spawn_ranks() -> None:
    with pytest.raises(ValueError, match="world_size=0: give the number of ranks"):
        spawn_ranks(0)
    with pytest.raises(TypeError, match="spawn_ranks is for async tests: write `async def wrong`"):

        @spawn_ranks(2)
        def wrong(pg: ProcessGroup) -> None: ...  # type: ignore[arg-type]
