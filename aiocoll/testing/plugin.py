"""The pytest plugin: ``@pytest.mark.ranks(1, 2, 7)`` runs an async test on all ranks of each world size.

    @pytest.mark.ranks(4)
    async def test_sum(pg):
        assert await pg.allreduce(pg.rank()) == 6

The test is pytest-asyncio's, in both of its modes. Every rank gets its own group as `pg`, and the same values of other
fixtures. With ``processes=True`` every rank is a process, and what other fixtures give must be picklable. Further
arguments are those of `run_ranks` and `run_processes`: ``timeout=``, ``options=``. With hypothesis' ``@given``, each
example runs on all ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import pytest

from aiocoll.group.process_group import ProcessGroup
from aiocoll.testing import examples
from aiocoll.testing.processes import run_test_processes
from aiocoll.testing.ranks import run_ranks
from aiocoll.testing.report import begins_nowhere, trimmed
from aiocoll.testing.skips import skip_early

__all__ = [
    "pg",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pycollect_makeitem",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
]

_ARGUMENTS = {"processes", "timeout", "options"}


class _OnEachRank:
    """The value of `pg` where there is no rank: in other fixtures."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __repr__(self) -> str:
        return f"<the group of each of {self.world_size} ranks>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"pg.{name}: the groups are made when the test runs; a fixture cannot use them")


@pytest.fixture(scope="session")  # hypothesis refuses fixtures that may need a new value for each example
def pg(request: pytest.FixtureRequest) -> Any:
    """The `ProcessGroup` of each rank, in a test marked with ``@pytest.mark.ranks``."""
    if not hasattr(request, "param"):
        pytest.fail("the fixture pg needs @pytest.mark.ranks(WORLD_SIZE, ...) on its test", pytrace=False)
    return _OnEachRank(request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, processes=False, timeout=..., options=None): run an async test with the fixture pg on all "
        "ranks, once for each world size",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Generator[None, Any, Any]:
    """Make a marked test one of pytest-asyncio's strict mode; it looks for its mark in the rest of this hook."""
    marks = [*getattr(obj, "pytestmark", ()), *collector.iter_markers("ranks")]
    if (
        inspect.iscoroutinefunction(examples.inner_test(obj))
        and any(mark.name == "ranks" for mark in marks)
        and collector.config.pluginmanager.hasplugin("asyncio")
    ):
        pytest.mark.asyncio(obj)
    return (yield)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each world size."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    where = f"{metafunc.definition.nodeid}: @pytest.mark.ranks"
    if not inspect.iscoroutinefunction(examples.inner_test(metafunc.function)):
        pytest.fail(f"{where} is for async tests: write `async def`", pytrace=False)
    if "pg" not in metafunc.fixturenames:
        pytest.fail(f"{where} needs the fixture pg: take it as an argument", pytrace=False)
    if not mark.args or not all(type(size) is int and size > 0 for size in mark.args):
        pytest.fail(f"{where} takes world sizes, as in ranks(1, 2, 7), not {mark.args}", pytrace=False)
    if unknown := mark.kwargs.keys() - _ARGUMENTS:
        pytest.fail(f"{where} takes {sorted(_ARGUMENTS)}, not {sorted(unknown)}", pytrace=False)
    metafunc.parametrize("pg", mark.args, ids=[f"ranks={size}" for size in mark.args], indirect=True, scope="function")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Replace the test by a function that runs it on all ranks."""
    mark = item.get_closest_marker("ranks")
    if mark is None or not isinstance(item, pytest.Function):
        yield
        return
    test = item.obj
    if examples.inner_test(test) is not test:
        everywhere: Any = item.funcargs["pg"]
        with examples.on_all_ranks(test, everywhere.world_size, set(item.funcargs), **mark.kwargs):
            yield
        return
    item.obj = _on_all_ranks(test, **mark.kwargs)
    try:
        yield
    finally:
        item.obj = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Show no traceback of an error from another process, or without frames of the test: its text is in the error."""
    report = yield
    if call.excinfo is not None and report.failed and begins_nowhere(call.excinfo.value):
        report.longrepr = _error_alone(call.excinfo)
    return report


def _error_alone(excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
    """Return pytest's text of an exception without its frames."""
    shown = excinfo.getrepr(style="long")
    traceback = shown.reprtraceback
    last: Any = traceback.reprentries[-1]
    last.lines = [line for line in last.lines if line.startswith("E")]
    last.reprfuncargs = last.reprlocals = last.reprfileloc = None
    traceback.reprentries = [last]
    return shown


def _on_all_ranks(test: Callable[..., Any], *, processes: bool = False, **how: Any) -> Callable[..., Any]:
    run = functools.partial(run_test_processes, test) if processes else run_ranks

    @functools.wraps(test)
    async def run_test(**fixtures: Any) -> None:
        __tracebackhide__ = True
        everywhere = fixtures.pop("pg")
        skip_early(everywhere.world_size, test, getattr(test, "__self__", None))
        try:
            await run(everywhere.world_size, _call, test, fixtures, **how)
        except BaseException as error:
            raise trimmed(error)  # noqa: B904 - it is the same exception

    return run_test


async def _call(group: ProcessGroup, test: Callable[..., Any], fixtures: dict[str, Any]) -> None:
    await test(pg=group, **fixtures)
