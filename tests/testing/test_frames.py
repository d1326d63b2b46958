"""Reports of failing ranks: lines of the test and the error, without frames of aiocoll."""

from __future__ import annotations

import re

import pytest

from aiocoll.testing.frames import clean_up

from .conftest import Project

pytest_plugins = ["pytester"]

SUITE = """
import asyncio
import numpy as np
import pytest
from aiocoll.testing import InProcessTestCase, MultiProcessTestCase, run_ranks, spawn_ranks

async def load(rank):
    raise LookupError("no data")  # line 7

@pytest.mark.ranks(2)
async def test_raises(pg):
    await load(pg.rank())  # line 11

@pytest.mark.ranks(2)
async def test_mismatch(pg):
    await pg.allreduce(np.ones(2 + pg.rank()))  # line 15

@pytest.mark.ranks(2)
async def test_argument(pg):
    await pg.broadcast(np.ones(2), 7)  # line 19

@pytest.mark.ranks(2)
async def test_block(pg):
    async with pg.coalescing():
        pg.allreduce(np.ones(2 + pg.rank()))

@pytest.mark.ranks(2)
async def test_tasks(pg):
    async with asyncio.TaskGroup() as group:
        group.create_task(load(1))

def test_direct():
    asyncio.run(run_ranks(2, lambda pg: load(1)))  # line 32

@pytest.mark.asyncio
@spawn_ranks(2)
async def test_spawned(pg):
    await pg.allreduce(np.ones(2 + pg.rank()))

class TestCase(InProcessTestCase):
    async def test_method(self):
        await self.pg.allreduce(np.ones(2 + self.rank))

@pytest.mark.ranks(2, processes=True)
async def test_process(pg):
    await pg.allreduce(np.ones(2 + pg.rank()))  # line 45
"""
SLOW = """
@pytest.mark.ranks(2, processes=True)
async def test_process_raises(pg):
    await load(pg.rank())

class TestProcesses(MultiProcessTestCase):
    world_size = 2
    async def test_method(self):
        await self.pg.allreduce(np.ones(2 + self.rank))
"""
#: Pattern of a report line that shows a frame of aiocoll, in the format of pytest or Python.
PACKAGE_FRAME = re.compile(r"^.*/aiocoll/[\w/]+\.py(?::\d+|\", line).*$", re.MULTILINE)


def test_failure_report_shows_only_the_frames_of_the_test(project: Project) -> None:
    result = project.run(SUITE)
    result.assert_outcomes(failed=9)
    text = result.stdout.str()
    assert PACKAGE_FRAME.findall(text) == []
    assert "direct cause" not in text
    assert "runners.py" not in text
    result.stdout.fnmatch_lines(
        [
            "*_ test_raises[[]ranks=2[]] _*",
            "test_it.py:11: *",
            "test_it.py:7: LookupError",
            "*_ test_mismatch[[]ranks=2[]] _*",
            ">*await pg.allreduce(np.ones(2 + pg.rank()))  # line 15",
            "E*CollectiveMismatchError: *",
            "E*rank ? of 2 failed first",
            "test_it.py:15: CollectiveMismatchError",
            "test_it.py:19: ValueError",
            "*_ test_direct _*",
            "test_it.py:32: *",
            "test_it.py:7: LookupError",
            "E*its traceback on rank ? of 2:",
            "E*Traceback (most recent call last):",
            'E*File "*test_it.py", line 45, in test_process',
            "E*await pg.allreduce(np.ones(2 + pg.rank()))  # line 45",
            "E*CollectiveMismatchError: *",
            "E*rank ? of 2 failed first",
        ]
    )


@pytest.mark.slow
def test_failure_report_hides_package_frames_for_every_kind_of_test(project: Project) -> None:
    result = project.run(SUITE + SLOW, "--tb=native")
    result.assert_outcomes(failed=11)
    assert PACKAGE_FRAME.findall(result.stdout.str()) == []


@pytest.mark.slow
def test_failure_report_shows_all_frames_on_request(project: Project) -> None:
    result = project.run(SUITE + SLOW, "--full-trace")
    result.assert_outcomes(failed=11)
    found = PACKAGE_FRAME.findall(result.stdout.str())
    for place in ("aiocoll/work.py:", "aiocoll/testing/ranks.py:", 'E.*aiocoll/work.py", line'):
        assert any(re.search(place, each) for each in found), place


@pytest.mark.usefixtures("frames_of_users")
def test_report_drops_an_equal_cause_and_keeps_a_different_cause() -> None:
    first, second, third = OSError("disk full"), ValueError("the same"), ValueError("the same")
    third.__cause__, second.__cause__, first.__cause__ = second, first, third
    assert clean_up(third, None) is None
    assert third.__cause__ is first
    assert first.__cause__ is third
