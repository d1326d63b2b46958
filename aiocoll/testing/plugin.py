"""Pytest plugin: ``@pytest.mark.ranks(1, 2, 7)`` runs an async test on all ranks of each world size.

    @pytest.mark.ranks(4)
    async def test_sum(pg):
        assert await pg.allreduce(pg.rank()) == 6

pytest-asyncio runs the test, in either of its modes. Every rank gets its own group as `pg`, and the same values of
other fixtures. With ``processes=True`` every rank is a process, and the values of other fixtures must be picklable.
Further arguments are those of `run_ranks` and `run_processes`: ``timeout=``, ``options=``, ``expect_death=``,
``allow_unretrieved=``. With hypothesis' ``@given``, each example runs on all ranks. With the mark ``anyio``, anyio runs
the test, on its asyncio backend.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from aiocoll.group.process_group import ProcessGroup
from aiocoll.testing import examples
from aiocoll.testing.deaths import check_deaths
from aiocoll.testing.frames import (
    clean_up,
    has_package_frames,
    is_without_frames,
    keep_all_frames,
    keeps_all_frames,
    trim,
)
from aiocoll.testing.loops import portable_loop
from aiocoll.testing.processes import run_team
from aiocoll.testing.ranks import run_ranks
from aiocoll.testing.skips import skip_early
from aiocoll.testing.team import Team

__all__ = [
    "pg",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pycollect_makeitem",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
]

pytest.register_assert_rewrite("aiocoll.testing.contracts")

_ARGUMENTS = {"allow_unretrieved", "expect_death", "options", "processes", "timeout"}


class _OnEachRank:
    """The placeholder that other fixtures get as `pg`, before the ranks exist."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __repr__(self) -> str:
        return f"<the group of each of {self.world_size} ranks>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"pg.{name}: the groups are made when the test runs; a fixture cannot use them")


@pytest.fixture(scope="session")  # hypothesis rejects fixtures of a smaller scope
def pg(request: pytest.FixtureRequest) -> Any:
    """Return the `ProcessGroup` of each rank, in a test marked with ``@pytest.mark.ranks``."""
    if not hasattr(request, "param"):
        pytest.fail("the fixture pg needs @pytest.mark.ranks(WORLD_SIZE, ...) on its test", pytrace=False)
    return _OnEachRank(request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark `ranks`, and read from the options whether reports show all frames."""
    if config.getoption("fulltrace", False):  # the option is missing if pytest's terminal plugin is disabled
        keep_all_frames()
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, processes=False, timeout=..., options=None, expect_death=None, allow_unretrieved=False): "
        "run an async test with the fixture pg on all ranks, once for each world size",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Generator[None, Any, Any]:
    """Add pytest-asyncio's mark to a test with ranks, unless anyio runs it; drop items of unrequested world sizes.

    pytest-asyncio looks for its mark in the rest of this hook.
    """
    marks = [*getattr(obj, "pytestmark", ()), *collector.iter_markers()]
    names = {mark.name for mark in (*marks, *_marks_of_parameters(marks))}
    if (
        inspect.iscoroutinefunction(examples.inner_test(obj))
        and "ranks" in names
        and "anyio" not in names
        and collector.config.pluginmanager.hasplugin("asyncio")
    ):
        pytest.mark.asyncio(obj)
    made = yield
    return [item for item in made if _has_world_size(item)] if isinstance(made, list) and "ranks" in names else made


def _has_world_size(item: Any) -> bool:
    """Return whether the mark of this item, which may be a parameter's own mark, contains the item's world size."""
    mark, case = _mark_of(item), getattr(item, "callspec", None)
    if case is None or "pg" not in case.params:
        return True
    if mark is None:
        where = f"{item.nodeid}: has no @pytest.mark.ranks"
        pytest.fail(f"{where}, but other parameters of it do; mark each pytest.param, or the test", pytrace=False)
    return case.params["pg"] in mark.args


def _mark_of(item: Any) -> pytest.Mark | None:
    """Return the mark `ranks` that applies to a test item: the mark of its parameters, else the closest mark."""
    case = getattr(item, "callspec", None)
    marks = () if case is None else (mark for mark in case.marks if mark.name == "ranks")
    mark: pytest.Mark | None = next(iter(marks), None) or item.get_closest_marker("ranks")
    return mark


def _marks_of_parameters(marks: Iterable[pytest.Mark]) -> Iterator[pytest.Mark]:
    """Yield the marks that ``pytest.param(..., marks=...)`` in the test's parametrizations contain."""
    for mark in marks:
        given = mark.args[1:2] or [mark.kwargs.get("argvalues")]
        values = given[0] if mark.name == "parametrize" else None
        for value in values if isinstance(values, list | tuple) else ():
            if isinstance(value, type(pytest.param())):
                yield from (each.mark if isinstance(each, pytest.MarkDecorator) else each for each in value.marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with the world sizes that its `ranks` marks contain."""
    closest = metafunc.definition.get_closest_marker("ranks")
    marks = [mark for mark in _marks_of_parameters(metafunc.definition.iter_markers()) if mark.name == "ranks"]
    if closest is not None:
        marks.append(closest)
    if not marks:
        return
    for mark in marks:
        _check_mark(metafunc, mark)
    sizes = list(dict.fromkeys(size for mark in marks for size in mark.args))
    metafunc.parametrize("pg", sizes, ids=[f"ranks={size}" for size in sizes], indirect=True, scope="function")


def _check_mark(metafunc: pytest.Metafunc, mark: pytest.Mark) -> None:
    where = f"{metafunc.definition.nodeid}: @pytest.mark.ranks"
    if not inspect.iscoroutinefunction(examples.inner_test(metafunc.function)):
        pytest.fail(f"{where} is for async tests: write `async def`", pytrace=False)
    if "pg" not in metafunc.fixturenames:
        pytest.fail(f"{where} needs the fixture pg: take it as an argument", pytrace=False)
    if not mark.args or not all(type(size) is int and size > 0 for size in mark.args):
        pytest.fail(f"{where} takes world sizes, as in ranks(1, 2, 7), not {mark.args}", pytrace=False)
    if unknown := mark.kwargs.keys() - _ARGUMENTS:
        pytest.fail(f"{where} takes {sorted(_ARGUMENTS)}, not {sorted(unknown)}", pytrace=False)
    if (deaths := mark.kwargs.get("expect_death")) is not None:
        _check_deaths(where, metafunc, mark, deaths)


def _check_deaths(where: str, metafunc: pytest.Metafunc, mark: pytest.Mark, deaths: Any) -> None:
    if not mark.kwargs.get("processes"):
        pytest.fail(f"{where}: expect_death needs processes=True; no other rank can die", pytrace=False)
    if examples.inner_test(metafunc.function) is not metafunc.function:
        pytest.fail(f"{where}: expect_death is not for @given, whose processes serve all examples", pytrace=False)
    try:
        for size in mark.args:
            check_deaths(deaths, size)
    except (TypeError, ValueError) as error:
        pytest.fail(f"{where}: {error}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Replace the test by a function that runs it on all ranks."""
    mark = _mark_of(item)
    if mark is None or not isinstance(item, pytest.Function):
        yield
        return
    test = item.obj
    if examples.inner_test(test) is not test:
        everywhere: Any = item.funcargs["pg"]
        with examples.on_all_ranks(test, everywhere.world_size, item.funcargs, **mark.kwargs):
            yield
        return
    item.obj = _on_all_ranks(test, **mark.kwargs)
    try:
        yield
    finally:
        item.obj = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Show only the test's frames in a failure report, and no traceback if there are none."""
    report = yield
    if call.excinfo is None or not report.failed or keeps_all_frames():
        return report
    error = call.excinfo.value
    if is_without_frames(error):
        clean_up(error, None)
        report.longrepr = _error_alone(call.excinfo)
    elif has_package_frames(call.excinfo.tb) and (trace := clean_up(error, call.excinfo.tb)) is not None:
        report.longrepr = item.repr_failure(pytest.ExceptionInfo.from_exc_info((type(error), error, trace)))
    return report


def _error_alone(excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
    """Return the text that pytest shows for an exception, without frames."""
    shown = excinfo.getrepr(style="long")
    traceback = shown.reprtraceback
    last: Any = traceback.reprentries[-1]
    last.lines = [line for line in last.lines if line.startswith("E")]
    last.reprfuncargs = last.reprlocals = last.reprfileloc = None
    traceback.reprentries = [last]
    return shown


def _on_all_ranks(test: Callable[..., Any], *, processes: bool = False, **how: Any) -> Callable[..., Any]:
    run = functools.partial(_run_processes, test) if processes else run_ranks

    @functools.wraps(test)
    async def run_test(**fixtures: Any) -> None:
        __tracebackhide__ = True
        everywhere = fixtures.pop("pg")
        skip_early(everywhere.world_size, test, getattr(test, "__self__", None))
        try:
            await run(everywhere.world_size, _call, test, fixtures, **how)
        except BaseException as error:
            raise trim(error)  # noqa: B904 - it is the same exception

    return run_test


async def _run_processes(
    test: Callable[..., Any], world_size: int, *call: Any, timeout: float | timedelta | None = 120.0, **how: Any
) -> None:
    await run_team(Team(world_size, test, loop=portable_loop(None), **how), timeout, *call)


async def _call(group: ProcessGroup, test: Callable[..., Any], fixtures: dict[str, Any]) -> None:
    await test(pg=group, **fixtures)
