"""Settings of all tests: the event loop, the marks of each test folder, and the check for leaked resources.

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
#: Folders whose tests start processes. `make test` runs these tests after the tests of other folders.
_PROCESSES = ("bench", "chaos", "cli", "hosts", "integration", "integrations", "reference", "testing", "typing")
#: The folders in `_PROCESSES` whose tests may run in parallel, except the files in `_ALONE`.
_BESIDE = ("cli", "hosts", "integration", "integrations", "reference", "testing", "typing")
#: Files whose tests run one after the other, since they measure time or check the machine.
_ALONE = (
    "cli/test_bench.py",
    "cli/test_tune.py",
    "hosts/test_hostile.py",
    "hosts/test_links.py",
    *(f"integration/test_{name}.py" for name in ("alive", "mismatch", "namespaces", "other_user", "recovery")),
)
_PAGES = ("test_contributing.py", "test_docs.py", "test_examples.py", "test_overlap.py", "test_pages.py",
          "test_site.py", "test_tutorials.py")  # fmt: skip
#: Marks that a test gets only from its folder, so that pytest can skip whole files by `-m`.
_BY_PLACE = {"processes", "beside"}
#: The folder of tests ported from torch. These tests are marked slow, since other tests cover the same features.
_SECOND_LOOK = "reference"
#: Folders and files whose tests do not depend on the transport. Each test runs over its first transport in `make
#: test`, and over its other transports as a slow test.
_ABOVE = ("engine", "group", "gpu", "meeting", "test_threads.py", "test_work.py")
#: Exceptions to `_ABOVE`: these files test a contract of all transports, so `make test` runs them over every transport.
_CONTRACT = ("test_collectives.py", "test_point_to_point.py")

# A shell lets its background processes ignore SIGINT. Processes that the tests interrupt would inherit this setting.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Use a path below which no file exists, so that no tuning file of this machine changes the tests.
os.environ["XDG_CACHE_HOME"] = os.devnull

# The first uvloop of a process opens a pipe that libuv never closes. Open this pipe here, so that the leak check does
# not blame the first test.
with suppress(ImportError):
    import uvloop

    uvloop.new_event_loop().close()

# In debug mode, asyncio records a traceback of ten or more lines for every callback, future and task. Recording takes
# longer than many tests. The first line of each traceback is enough.
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
    """Skip files whose tests ``-m`` deselects, since every pytest worker would take seconds to import all files."""
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
    """Sort the tests, set the transport of tests marked with `ranks`, and add the marks of each folder."""
    # Start long files first: a long file at the end would leave all other pytest workers idle.
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
    """Return the header line that shows the implementation and path of the tested package."""
    return f"aiocoll: {describe_implementation()}, {Path(aiocoll.__file__).parent}"


@pytest.fixture(scope="module", autouse=True)
def _freeze_older_objects() -> None:
    """Exempt existing objects from garbage collection, since pytest holds tens of thousands of test objects."""
    gc.collect()
    gc.freeze()


def _open_files() -> dict[str, str]:
    """Return the target of each file descriptor of this process, or an empty dictionary without /proc."""
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
    """Hide the processor model from aiocoll, so that tuning defaults are the same on every machine."""
    replace_parts(monkeypatch, processors_file=os.devnull)


@pytest.fixture(autouse=True)
def _slow_tests_without_debug_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off asyncio's debug mode in slow tests, since the debug mode takes 12 % of their time."""
    if request.node.get_closest_marker("slow") is not None:
        monkeypatch.delenv("PYTHONASYNCIODEBUG", raising=False)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread or an open file behind.

    The check runs after the event loop of the test is closed and its patches are undone.
    """
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
    """Request the fixture `_finished_tasks` for coroutine tests, since other tests have no event loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_finished_tasks")


@pytest.fixture
async def _finished_tasks() -> AsyncIterator[None]:
    """Fail a coroutine test that leaves an unfinished task behind.

    This fixture is the first one of the event loop, so pytest tears it down after all other fixtures.
    """
    yield
    # Tasks that the test cancelled at its end need one loop iteration to finish.
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"the test left tasks running: {left}"
