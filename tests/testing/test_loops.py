"""The event loop of ranks in processes, which is the loop of their test by default."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from aiocoll.testing import run_processes, spawn_ranks
from aiocoll.testing.loops import loop_factory, loop_of_fixtures, portable_loop
from tests.testing import jobs

from .conftest import Project

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module", autouse=True)
def _pipe_of_libuv() -> None:
    """Make a first loop in advance, since libuv never closes its pipe, which must not count as a leak."""
    with contextlib.suppress(ImportError):
        loop_factory("uvloop")().close()


def run(factory: Callable[[], asyncio.AbstractEventLoop], call: Callable[[], Any]) -> Any:
    """Run a coroutine function on a loop from a factory."""
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(call())


def test_process_ranks_run_on_the_kind_of_loop_of_their_caller() -> None:
    uvloop = pytest.importorskip("uvloop")
    for rank in run(uvloop.new_event_loop, lambda: run_processes(2, jobs.describe_rank)):
        assert rank["loop"] == "uvloop"


def test_explicitly_named_loop_overrides_the_loop_of_the_caller() -> None:
    uvloop = pytest.importorskip("uvloop")
    for rank in run(uvloop.new_event_loop, lambda: run_processes(2, jobs.describe_rank, loop="asyncio")):
        assert rank["loop"] == "asyncio"


def test_process_ranks_can_run_on_a_loop_class_of_their_module() -> None:
    for rank in run(jobs.OwnLoop, lambda: run_processes(2, jobs.describe_rank)):
        assert rank["loop"] == "tests"


@spawn_ranks(2, processes=True)
async def spawned(pg: Any) -> None:
    assert type(asyncio.get_running_loop()).__module__.partition(".")[0] == "uvloop"


def test_spawned_process_ranks_run_on_the_kind_of_loop_of_their_caller() -> None:
    uvloop = pytest.importorskip("uvloop")
    run(uvloop.new_event_loop, spawned)


def test_loop_class_that_other_processes_cannot_import_is_refused() -> None:
    class Local(asyncio.SelectorEventLoop):
        pass

    with pytest.raises(
        TypeError, match=r"the test's event loop is a .*<locals>\.Local, which ranks that are processes"
    ):
        run(Local, lambda: run_processes(2, jobs.describe_rank))


def test_loop_class_that_needs_arguments_is_refused_by_the_rank() -> None:
    with pytest.raises(
        TypeError, match="event loop is a NeedyLoop, which the process of a rank cannot make without arg"
    ):
        run(lambda: jobs.NeedyLoop(1), lambda: run_processes(2, jobs.describe_rank))


def test_error_names_a_loop_class_that_cannot_be_imported() -> None:
    with pytest.raises(RuntimeError, match=r"class of the test's event loop cannot be imported .*no_such_module"):
        loop_factory(b"cno_such_module\nLoop\n.")


def test_wrong_loop_name_is_refused() -> None:
    with pytest.raises(ValueError, match="loop='trio': must be 'asyncio' or 'uvloop'"):
        portable_loop("trio")


def test_loop_kind_is_derived_from_fixtures_before_the_loop_runs() -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert loop_of_fixtures({"tmp_path": 1, "_function_scoped_runner": runner}) == "uvloop"
    assert loop_of_fixtures({"anyio_backend": ("asyncio", {"use_uvloop": True})}) == "uvloop"
    assert loop_of_fixtures({"anyio_backend": ("asyncio", {"loop_factory": uvloop.new_event_loop})}) == "uvloop"
    assert loop_of_fixtures({"anyio_backend": ("asyncio", {"debug": True})}) == "asyncio"
    assert loop_of_fixtures({"anyio_backend": "asyncio"}) == "asyncio"
    assert loop_of_fixtures({}) == "asyncio"


HOOK = """
import asyncio, uvloop
def pytest_asyncio_loop_factories():
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""
ANYIO = """
import pytest
pytestmark = pytest.mark.anyio
@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return "asyncio", {"use_uvloop": request.param}
"""
CHECK = """
import asyncio, pytest
from hypothesis import given, settings, strategies as st

def check(request):
    kind = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    assert kind in request, (kind, request)

@pytest.fixture
def name(request):
    return request.node.name.partition("[")[2]

@pytest.mark.ranks(2, processes=True)
async def test_processes(pg, name):
    check(name)

@pytest.mark.ranks(2)
async def test_tasks(pg, name):
    check(name)
"""
GIVEN = """
@pytest.mark.ranks(2, processes=True)
@settings(deadline=None, max_examples=2, database=None, suppress_health_check=["function_scoped_fixture"])
@given(number=st.integers())
async def test_given(pg, name, number):
    check(name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hook", "anyio"])
def test_loop_that_a_test_requests_runs_in_its_process_ranks(
    way: str, project: Project, pytester: pytest.Pytester
) -> None:
    pytest.importorskip("uvloop")
    if way == "anyio":
        result = project.run(ANYIO + CHECK + GIVEN, asyncio=False, anyio=True)
    else:
        pytester.makeconftest(HOOK)
        result = project.run(CHECK + GIVEN)
    result.assert_outcomes(passed=6)
