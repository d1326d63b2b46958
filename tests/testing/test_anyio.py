"""Test suites that use anyio's plugin, and programs on trio, which aiocoll refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll.store import FileStore, HashStore, TCPStore
from aiocoll.testing import run_processes, run_ranks, spawn_ranks

from .conftest import ROOT, Project
from .jobs import describe_rank

pytest_plugins = ["pytester"]

REMEDY = r"trio is running, but aiocoll needs an event loop.*`await trio\.to_thread\.run_sync\(asyncio\.run, "

SUITE = """
import asyncio
import anyio
import pytest
from hypothesis import given, settings, strategies as st

pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.fixture
async def number(anyio_backend):
    await anyio.sleep(0)
    return asyncio.get_running_loop(), 20

@pytest.mark.ranks(1, 3)
async def test_sum(pg, number):
    loop, value = number
    assert asyncio.get_running_loop() is loop
    assert await pg.allreduce(value) == 20 * pg.size()

@pytest.mark.ranks(2)
class TestClass:
    async def test_method(self, pg):
        async def meet():
            await pg.barrier()

        async with anyio.create_task_group() as group:
            group.start_soon(meet)

@pytest.mark.ranks(2, processes=True)
async def test_processes(pg):
    assert await pg.allgather_object(pg.rank()) == [0, 1]

@pytest.mark.ranks(2)
@settings(max_examples=3, deadline=None, database=None)
@given(x=st.integers())
async def test_examples(pg, x):
    assert await pg.allgather_object(x) == [x, x]

@pytest.mark.ranks(2)
async def test_failure(pg):
    assert pg.rank() == 0, "unlucky"
    await pg.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("asyncio", [False, True])
def test_tests_of_the_anyio_plugin_run_on_ranks(project: Project, asyncio: bool) -> None:
    pytest.importorskip("anyio")
    result = project.run(SUITE, "-p", "_hypothesis_pytestplugin", asyncio=asyncio, anyio=True)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["E*AssertionError: unlucky*", "E*rank 1 of 2 failed first", "test_it.py:*: Assert*"])


@pytest.mark.slow
def test_anyio_backend_trio_is_refused_with_an_error_that_names_trio(project: Project) -> None:
    pytest.importorskip("anyio")
    pytest.importorskip("trio")
    source = """
import pytest
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]
@pytest.mark.ranks(2)
async def test_tasks(pg):
    await pg.barrier()
@pytest.mark.ranks(2, processes=True)
async def test_processes(pg):
    await pg.barrier()
"""
    result = project.run(source, "-W", "ignore::DeprecationWarning:trio", asyncio=False, anyio=True)
    result.assert_outcomes(passed=2, failed=2)
    text, _, _ = result.stdout.str().partition("short test summary")  # pytest may truncate lines of the summary
    assert text.count(" RuntimeError: trio is running, but aiocoll needs an event loop of asyncio or uvloop") == 2
    assert text.count('in tests with a fixture anyio_backend that returns "asyncio"') == 2
    assert "Traceback" not in text


async def use_store(store: aiocoll.Store) -> None:
    async with store:
        await store.set("key", b"value")
        await store.wait(["another"], 0.1)


@spawn_ranks(2)
async def spawned(pg: aiocoll.ProcessGroup) -> None:
    pass


@spawn_ranks(2, processes=True)
async def in_processes(pg: aiocoll.ProcessGroup) -> None:
    pass


async def add_one(pg: aiocoll.ProcessGroup) -> int:
    return await pg.allreduce(1)


async def enter(manager: Any) -> None:
    async with manager:
        pass


async def first_group(groups: AsyncIterator[Any]) -> None:
    await anext(aiter(groups))


HERE = {"rank": 0, "world_size": 1, "init_method": "tcp://127.0.0.1:1"}


def refused_calls(path: Path) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "run_ranks": lambda: run_ranks(2, add_one),
        "run_processes": lambda: run_processes(2, describe_rank),
        "spawn_ranks": spawned,
        "spawn_ranks of processes": in_processes,
        "HashStore": lambda: use_store(HashStore()),
        "FileStore": lambda: use_store(FileStore(path / "file")),
        "TCPStore": lambda: use_store(TCPStore("127.0.0.1", 1)),
        "Meeting": lambda: enter(aiocoll.Meeting(1)),
        "new_group": lambda: enter(aiocoll.new_group(**HERE)),  # type: ignore[arg-type]
        "elastic": lambda: first_group(aiocoll.elastic(**HERE)),  # type: ignore[arg-type]
        "init_process_group": lambda: dist.init_process_group(**HERE),  # type: ignore[arg-type]
        "a group without arguments": lambda: enter(aiocoll.new_group()),
        "a dry run": lambda: dist.init_process_group("fake", rank=0, world_size=4),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning:trio")
def test_trio_program_is_refused_with_a_remedy(tmp_path: Path) -> None:
    trio = pytest.importorskip("trio")
    for name, way in refused_calls(tmp_path).items():
        with pytest.raises(RuntimeError, match=REMEDY):
            raise AssertionError(f"{name} works: {trio.run(way)}")


PROGRAM = """
import asyncio, trio
from aiocoll.testing import run_ranks

async def add(pg):
    return await pg.allreduce(1)

async def main():
    return await run_ranks(2, add)

async def in_trio():
    print(await trio.to_thread.run_sync(asyncio.run, main()))

trio.run(in_trio)
"""


def test_remedy_in_the_error_for_a_trio_program_works() -> None:
    pytest.importorskip("trio")
    command = [sys.executable, "-c", PROGRAM]
    env = {**os.environ, "PYTHONASYNCIODEBUG": ""}  # debug mode reports slow steps, which occur on a busy machine
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 2]\n", "")
