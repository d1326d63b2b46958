"""Settings of all tests: the event loop, the marks by folder, and the check that a test leaves nothing behind.

`AIOCOLL_TEST_LOOP` chooses the loop: ``asyncio`` (the default) or ``uvloop``.
"""

from __future__ import annotations

import asyncio
import asyncio.constants
import gc
import inspect
import os
import re
import signal
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

import aiocoll
from aiocoll.native import describe_implementation
from aiocoll.testing.frames import keep_all_frames

from .internals import Limits, replace_parts, set_limits
from .ports import free_port
from .ranks import options

_FDS = Path("/proc/self/fd")
_HERE = Path(__file__).parent
#: Folders and files whose tests start processes. `make test` runs these tests after the others.
_PROCESSES = ("bench", "chaos", "cli", "hosts", "integration", "integrations", "reference", "testing", "typing")
#: The folders in `_PROCESSES` whose tests run in parallel; tests that measure time or check the machine run alone.
_BESIDE = ("cli", "hosts", "integration", "integrations", "reference", "testing", "typing")
_ALONE = (
    "cli/test_bench.py",
    "cli/test_tune.py",
    "hosts/test_hostile.py",
    "hosts/test_links.py",
    *(f"integration/test_{name}.py" for name in ("alive", "mismatch", "namespaces", "other_user", "recovery")),
)
_PAGES = ("test_contributing.py", "test_docs.py", "test_examples.py", "test_overlap.py", "test_pages.py",
          "test_site.py", "test_tutorials.py")  # fmt: skip
#: Marks that depend on the folder alone, so that `-m` leaves out whole files.
_BY_PLACE = {"processes", "beside"}
#: The folder of tests ported from torch. They are marked slow, since other tests cover the same features.
_SECOND_LOOK = "reference"
#: Tests of features above the transports: `make test` runs them over the first transport that a test names.
_ABOVE = ("engine", "group", "gpu", "meeting", "test_threads.py", "test_work.py")
#: Files of these folders that test a contract of all transports, so that `make test` runs them over each.
_CONTRACT = ("test_collectives.py", "test_point_to_point.py")

# Background processes of a shell ignore SIGINT, and processes that tests start and interrupt would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Use a path below which no file exists, so that no tuning file of this machine changes the tests.
os.environ["XDG_CACHE_HOME"] = os.devnull

# The first uvloop of a process opens a pipe that libuv never closes. It must not count as a leak of the first test.
with suppress(ImportError):
    import uvloop

    uvloop.new_event_loop().close()

# In debug mode, asyncio records a traceback for every callback, future and task, with ten lines or more. That takes
# longer than many tests. The first line is enough.
asyncio.constants.DEBUG_STACK_DEPTH = 1  # type: ignore[misc]
traceback.extract_stack.__defaults__ = (None, 1)  # asyncio's C code holds this function, so its defaults are changed


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the factory of the loop that `AIOCOLL_TEST_LOOP` names, for pytest-asyncio."""
    return _loop_factories(os.environ.get("AIOCOLL_TEST_LOOP", "asyncio"))


@cache
def _loop_factories(chosen: str) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if chosen == "asyncio":
        return {chosen: asyncio.new_event_loop}
    if chosen == "uvloop":
        return {chosen: uvloop.new_event_loop}
    raise pytest.UsageError(f"AIOCOLL_TEST_LOOP={chosen!r}: must be asyncio or uvloop")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Return a function that changes internal limits by name, such as ``limits(device_parting=0.05)``."""
    return partial(set_limits, monkeypatch)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """Return the transport of a test marked with `ranks`: its parameter, or "memory"."""
    return getattr(request, "param", "memory")


@pytest.fixture
def port() -> int:
    """Return a port on which nothing listens at 127.0.0.1."""
    return free_port()


def pytest_configure() -> None:
    """Show aiocoll's frames in failure reports, since these tests may fail inside aiocoll."""
    keep_all_frames()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files whose tests ``-m`` leaves out, since each process of pytest would take seconds to read all files."""
    expression = config.option.markexpr
    if collection_path.suffix != ".py" or re.search(r"\bor\b|\(", expression):
        return None
    terms, marks = expression.split(" and "), _marks(collection_path)
    unwanted = marks & {term.removeprefix("not ") for term in terms if term.startswith("not ")}
    missing = _BY_PLACE & set(terms) - marks
    return True if unwanted or missing else None


def _marks(path: Path) -> set[str]:
    """Return the pytest marks that all tests of a file get because of their folder."""
    file = path.relative_to(_HERE)
    top = file.parts[0]
    return {
        *(["processes"] if top in (*_PROCESSES, *_PAGES) else []),
        *(["beside"] if top in (*_BESIDE, *_PAGES) and file.as_posix() not in _ALONE else []),
        *(["slow"] if top == _SECOND_LOOK else []),
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the transport parameter of marked tests, and add the marks for processes and slow tests."""
    # Long files first: a long file at the end would leave all other workers idle.
    items.sort(key=lambda item: item.path.name not in _PAGES)
    first: dict[tuple[Path, str], str] = {}
    for item in items:
        top = item.path.relative_to(_HERE).parts[0]
        if _BY_PLACE & {mark.name for mark in item.iter_markers()}:
            raise pytest.UsageError(
                f"{item.nodeid}: a test that starts processes belongs in one of the folders {_PROCESSES}"
            )
        for mark in sorted(_marks(item.path)):
            item.add_marker(mark)
        case = getattr(item, "callspec", None)
        if case is None or "transport" not in case.params:
            continue
        transport = case.params["transport"]
        if (mark := item.get_closest_marker("ranks")) is not None:
            chosen = options(transport)
            item.add_marker(pytest.mark.ranks(*mark.args, **mark.kwargs, options=chosen), append=False)
        if top in _ABOVE and item.path.name not in _CONTRACT:
            test = item.path, getattr(item, "originalname", item.name)
            if first.setdefault(test, transport) != transport:
                item.add_marker(pytest.mark.slow)


def pytest_report_header() -> str:
    """Return a line with the tested package."""
    return f"aiocoll: {describe_implementation()}, {Path(aiocoll.__file__).parent}"


@pytest.fixture(scope="module", autouse=True)
def _freeze_older_objects() -> None:
    """Exempt existing objects from garbage collection: the tests themselves are tens of thousands of objects."""
    gc.collect()
    gc.freeze()


def _open_files() -> dict[str, str]:
    """Return the target of each file descriptor of this process; {} without /proc."""
    found = {}
    if _FDS.exists():
        for fd in os.listdir(_FDS):
            with suppress(OSError):  # the descriptor of the directory listing itself is already closed
                found[fd] = os.readlink(_FDS / fd)
    # multiprocessing opens one pipe at its first use, and never closes it.
    found.pop(str(getattr(resource_tracker._resource_tracker, "_fd", None)), None)
    return found


@pytest.fixture(autouse=True)
def _hide_processor(_nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the processor, so that tuning defaults are the same on every machine."""
    replace_parts(monkeypatch, processors_file=os.devnull)


@pytest.fixture(autouse=True)
def _slow_tests_without_debug_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off asyncio's debug mode in slow tests: it takes 12 % of the time, and covers the other tests."""
    if request.node.get_closest_marker("slow") is not None:
        monkeypatch.delenv("PYTHONASYNCIODEBUG", raising=False)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread or an open file; the check runs outside the loop and the patches of the test."""
    # CUDA and NCCL keep some files open until the process ends.
    keeps = request.node.get_closest_marker("gpu") is not None
    threads, files = set(threading.enumerate()), None if keeps else _open_files()
    yield
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith(("asyncio-waitpid-", "aiocoll warning ")):
            thread.join(1.0)  # a thread that reports the end of a process or writes a log line ends a moment later
    if _leaks(threads, files):
        gc.collect()  # garbage in a cycle is no leak; a collection after every test would take minutes
    assert not (left := _leaks(threads, files)), f"the test left behind: {left}"


def _leaks(threads: set[threading.Thread], files: Mapping[str, str] | None) -> list[str]:
    now = {} if files is None else _open_files()
    return [
        *(f"thread {thread.name}" for thread in threading.enumerate() if thread not in threads),
        *(f"file {what}" for fd, what in now.items() if files is not None and files.get(fd) != what),
    ]


@pytest.fixture(autouse=True)
def _no_task_left_behind(_nothing_left_behind: None, request: pytest.FixtureRequest) -> None:
    """Fail a coroutine test that leaves a task; the check itself is in `_finished_tasks`, which needs a loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_finished_tasks")


@pytest.fixture
async def _finished_tasks() -> AsyncIterator[None]:
    """Check for unfinished tasks after the test; as the first fixture, it is torn down after all other fixtures."""
    yield
    # One loop iteration ends the tasks that the test cancelled or closed last.
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"the test left tasks running: {left}"
