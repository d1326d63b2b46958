"""What every test runs under: the chosen event loop, and nothing left behind.

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

from .internals import Limits, replaced, set_limits
from .ports import free_port
from .ranks import options

_FDS = Path("/proc/self/fd")
_HERE = Path(__file__).parent
#: Folders and files whose tests start processes: `make test` runs these after the others.
_PROCESSES = ("bench", "chaos", "cli", "hosts", "integration", "integrations", "reference", "testing", "typing")
#: Of these, those that run beside each other; what measures seconds, or looks at the whole machine, does not.
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
#: Marks that tests have because of where they are, and no others: `-m` leaves out whole files.
_BY_PLACE = {"processes", "beside"}
#: Tests after those of other libraries: what they show has tests of our own.
_SECOND_LOOK = "reference"
#: Tests of what is above the transports: `make test` takes the first one that a test names.
_ABOVE = ("engine", "group", "gpu", "meeting", "test_threads.py", "test_work.py")
#: But in these, of what every transport must do, it takes all.
_CONTRACT = ("test_collectives.py", "test_point_to_point.py")

# What a shell runs in the background ignores SIGINT, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What somebody has measured on this machine must not decide what is tested: there is no file below this one.
os.environ["XDG_CACHE_HOME"] = os.devnull

# The first loop of uvloop in a process opens a pipe that libuv keeps for good: not a leak of the first test.
with suppress(ImportError):
    import uvloop

    uvloop.new_event_loop().close()

# In debug mode asyncio notes where every callback, future and task was made: of callbacks ten lines, of the others all,
# which takes longer than many tests do themselves. The first line is what helps.
asyncio.constants.DEBUG_STACK_DEPTH = 1  # type: ignore[misc]
traceback.extract_stack.__defaults__ = (None, 1)  # asyncio's C code has this function, whatever its module has since


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give pytest-asyncio the loop that `AIOCOLL_TEST_LOOP` names."""
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
    """Change seconds, sizes and counts of aiocoll by their names in `LIMITS`: ``limits(device_parting=0.05)``."""
    return partial(set_limits, monkeypatch)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """Return the transport of a test marked with `ranks`: its parameter, or memory."""
    return getattr(request, "param", "memory")


@pytest.fixture
def port() -> int:
    """Return a port on which nothing listens at 127.0.0.1."""
    return free_port()


def pytest_configure() -> None:
    """Show frames of aiocoll, too, in reports: here they may be what is wrong."""
    keep_all_frames()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no file all of whose tests ``-m`` leaves out: reading all takes seconds, and each process of pytest does."""
    asked = config.option.markexpr
    if collection_path.suffix != ".py" or re.search(r"\bor\b|\(", asked):
        return None
    terms, marks = asked.split(" and "), _marks(collection_path)
    unwanted = marks & {term.removeprefix("not ") for term in terms if term.startswith("not ")}
    missing = _BY_PLACE & set(terms) - marks
    return True if unwanted or missing else None


def _marks(path: Path) -> set[str]:
    """Return what all tests of a file are marked with because of where it is."""
    file = path.relative_to(_HERE)
    top = file.parts[0]
    return {
        *(["processes"] if top in (*_PROCESSES, *_PAGES) else []),
        *(["beside"] if top in (*_BESIDE, *_PAGES) and file.as_posix() not in _ALONE else []),
        *(["slow"] if top == _SECOND_LOOK else []),
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the ranks of a test its transport; mark what starts processes, and what is slow."""
    # Long files first: with one of them at the end, all workers but one would have nothing to do.
    items.sort(key=lambda item: item.path.name not in _PAGES)
    first: dict[tuple[Path, str], str] = {}
    for item in items:
        top = item.path.relative_to(_HERE).parts[0]
        if _BY_PLACE & {mark.name for mark in item.iter_markers()}:
            raise pytest.UsageError(f"{item.nodeid}: what starts processes belongs in one of the folders {_PROCESSES}")
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
    """Tell which package is tested."""
    return f"aiocoll: {describe_implementation()}, {Path(aiocoll.__file__).parent}"


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_kept() -> None:
    """Let no collection of garbage look at what is there for long: the tests themselves, by the ten thousand."""
    gc.collect()
    gc.freeze()


def _open_files() -> dict[str, str]:
    """Return what each file descriptor of this process is; {} where there is no way to tell."""
    found = {}
    if _FDS.exists():
        for fd in os.listdir(_FDS):
            with suppress(OSError):  # the one that listed the others
                found[fd] = os.readlink(_FDS / fd)
    # multiprocessing keeps one pipe for the life of the process, from its first use on.
    found.pop(str(getattr(resource_tracker._resource_tracker, "_fd", None)), None)
    return found


@pytest.fixture(autouse=True)
def _on_no_known_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of this process choose as they do on any machine."""
    replaced(monkeypatch, processors_file=os.devnull)


@pytest.fixture(autouse=True)
def _slow_tests_need_no_debug_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let asyncio's debug mode, which takes an eighth of the time, look at what `make test` runs, and no further."""
    if request.node.get_closest_marker("slow") is not None:
        monkeypatch.delenv("PYTHONASYNCIODEBUG", raising=False)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a thread or an open file; set up before and torn down after the loop of the test."""
    # CUDA and NCCL keep files of their own for the life of the process.
    keeps = request.node.get_closest_marker("gpu") is not None
    threads, files = set(threading.enumerate()), None if keeps else _open_files()
    yield
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("asyncio-waitpid-"):
            thread.join(1.0)  # asyncio says that a process has ended from its thread, which goes on for a moment
    if _leaks(threads, files):
        gc.collect()  # what only a cycle keeps is no leak; collecting after every test would take minutes
    assert not (left := _leaks(threads, files)), f"the test left behind: {left}"


def _leaks(threads: set[threading.Thread], files: Mapping[str, str] | None) -> list[str]:
    now = {} if files is None else _open_files()
    return [
        *(f"thread {thread.name}" for thread in threading.enumerate() if thread not in threads),
        *(f"file {what}" for fd, what in now.items() if files is not None and files.get(fd) != what),
    ]


@pytest.fixture(autouse=True)
def _no_task_left_behind(_nothing_left_behind: None, request: pytest.FixtureRequest) -> None:
    """No coroutine test leaves a task; this one goes through `_finished_tasks`, which needs a loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_finished_tasks")


@pytest.fixture
async def _finished_tasks() -> AsyncIterator[None]:
    """Set up before the other fixtures of a test, so it looks when they have cleaned up."""
    yield
    # One turn for what the test ended by cancelling, or closed, to end.
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"the test left tasks running: {left}"
