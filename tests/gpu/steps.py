"""The steps of `run.py`: their processes, requirements and order."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tests.gpu.device_kinds import ADAPTER, ADAPTERS, REAL, SIMULATED

ROOT = Path(__file__).parents[2]
#: The maximum time in seconds for hung processes to write the stacks of their threads.
STACK_SECONDS = 3.0
#: Load all CUDA kernels at the start. Otherwise, CUDA loads a kernel at its first launch, which waits for running
#: kernels. torch is an exception: its kernels take many seconds to load in each process.
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}

#: The factor for time limits on the fake device, because other processes may slow the machine down.
SLOW = 2

#: The modes of `on_device/aiocoll_rank.py` that run with each adapter.
PAIRED = ("sum", "killed", "aborted", "mismatched", "crossed", "queued")
#: Requirements of every step with NCCL, and of the steps that pytest runs.
TESTS = ("nccl", "pytest", "ml_dtypes")
PYTEST = (*TESTS, "pytest_asyncio")


class Step(NamedTuple):
    """A test step, which runs in a separate process.

    Attributes:
        name: of the step.
        limit: time limit in seconds.
        words: arguments of the Python interpreter.
        needs: requirements.
        after: a step that must pass first.
        environment: additional environment variables.
    """

    name: str
    limit: float
    words: Sequence[str]
    needs: Sequence[str] = ()
    after: str | None = None
    environment: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """The outcome of a test step: its state, duration and reason.

    Attributes:
        state: "passed", "failed", "hung", "left out" or "not run"; all but the first and "left out" are failures.
        seconds: its duration.
        why: the reason for any state but "passed".
    """

    state: str
    seconds: float = 0.0
    why: str = ""


class _Maker(NamedTuple):
    """A factory for test steps.

    Attributes:
        fake: whether the steps use the fake device.
        folder: for the files of the steps.
        plugins: options that let pytest load its plugins.
        libraries: the usable array libraries; some steps need only one.
    """

    fake: bool
    folder: Path
    plugins: Sequence[str]
    libraries: Sequence[str]

    @property
    def kinds(self) -> Sequence[str]:
        """The device kinds of this run: simulated ones, or all array libraries for real devices."""
        return SIMULATED if self.fake else REAL

    @property
    def raw_by(self) -> str:
        """The library of the first step with two ranks, which uses NCCL without aiocoll; later steps depend on it."""
        return "library" if self.libraries[0] == "torch" else self.libraries[0]

    def needed(self, kind: str) -> Sequence[str]:
        """Return the requirements of steps with this array library; simulated devices have none."""
        return () if self.fake else (kind,)

    def pytest(self, *more: str) -> Sequence[str]:
        return ("-m", "pytest", "-q", *self.plugins, "-W", "default", *more)

    def alone(self) -> Iterator[Step]:
        """Yield the single-rank steps of each array library."""
        for kind in self.kinds:
            needs = (*TESTS, *self.needed(kind))
            yield Step(f"alone {kind}", 45, ("-m", "tests.gpu.on_device.single_rank", kind), needs)

    def two(
        self, name: str, module: str, how: str, after: str | None = "aiocoll", kind: str = "", **environment: str
    ) -> Step:
        """Make a step with two ranks on one device."""
        words = ("-m", "tests.gpu.on_device.two", module, how, kind or self.libraries[0], str(self.folder))
        return Step(name, 55, words, TESTS, after, environment)

    def raw(self) -> Iterator[Step]:
        """Yield two steps with two ranks that call NCCL without aiocoll: by an array library, and by libnccl."""
        kind = self.kinds[0]
        step = self.two(f"raw by {kind}", "raw", kind, None, kind)
        yield step._replace(needs=(*step.needs, *self.needed(kind)))
        step = self.two("raw by library", "raw", "library", None, "simulated" if self.fake else "")
        yield step._replace(needs=(*step.needs, *self.needed("ctypes")))

    def pairs(self) -> Iterator[Step]:
        """Yield the steps in which two ranks use aiocoll."""
        yield self.two("aiocoll", "aiocoll_rank", "sum", after=f"raw by {self.raw_by}")
        yield from (self.two(how, "aiocoll_rank", how) for how in PAIRED[1:])
        yield self.two("compared before", "aiocoll_rank", "sum", AIOCOLL_VERIFY="before")
        yield self.two("exit with RAS", "aiocoll_rank", "sum", NCCL_RAS_ENABLE="1")
        yield self.two("exit with RAS unclosed", "aiocoll_rank", "left", NCCL_RAS_ENABLE="1")
        if self.fake:
            for how in PAIRED:
                yield self.two(f"{how} simulated", "aiocoll_rank", how, "raw by library", "simulated")

    def tests(
        self, file: str, limit: float, name: str = "", chosen: str = "", after: str | None = None
    ) -> Iterator[Step]:
        """Yield a step for each array library that runs a test file, or only its tests that match `chosen`."""
        for kind in self.kinds:
            which = f"{kind} and {chosen}" if chosen else kind
            picked = ("-m", "not gpu" if self.fake else "gpu", "-k", which, "--durations=3")
            words = self.pytest(*picked, "-o", f"faulthandler_timeout={limit - 10:g}")
            yield Step(
                f"{name or file} {kind}",
                limit,
                (*words, f"tests/gpu/on_device/test_{file}.py"),
                (*PYTEST, *self.needed(kind)),
                after,
                {} if kind == "torch" else EAGER,
            )

    def adapters(self) -> Iterator[Step]:
        """Yield steps that repeat tests through the ctypes adapter; on the fake device, through both adapters."""
        for adapter in ADAPTERS if self.fake else ADAPTERS[1:]:
            yield from self.adapter(adapter)

    def adapter(self, adapter: str) -> Iterator[Step]:
        kind, by = self.libraries[-1], {ADAPTER: adapter}
        more = () if self.fake else ("cupy", "ctypes")
        found = [
            Step(f"alone {kind}", 45, ("-m", "tests.gpu.on_device.single_rank", kind), TESTS),
            *(self.two(how, "aiocoll_rank", how, kind=kind) for how in PAIRED),
            *(step for step in self.tests("streams", 50) if step.name.endswith(kind)),
        ]
        if self.fake:  # the test needs more devices than a real machine has
            words = self.pytest(
                "tests/gpu/test_overlapping.py", "-k", "row_and_column or kinds or first_group or failed_group"
            )
            found.append(Step("overlapping", 50, words, PYTEST))
        for step in found:
            name, environment = f"{step.name} by {adapter}", {**step.environment, **by}
            yield step._replace(name=name, needs=(*step.needs, *more), environment=environment)

    def bench(self) -> Step:
        words = ("bench/gpu.py", "--quick", *(["--fake"] if self.fake else ["--kind", self.libraries[0]]))
        output = ("--output", f"{self.folder}/RESULTS-gpu.md")
        return Step("bench", 60, (*words, *output), (*TESTS, "uvloop"))


def all_steps(fake: bool, folder: Path, plugins: Sequence[str], missing: Container[str]) -> list[Step]:
    """Return all test steps of a run, in the order in which they run.

    Args:
        fake: whether to use the fake device.
        folder: for the files of the steps.
        plugins: options that let pytest load its plugins.
        missing: names of missing requirements.
    """
    make = _Maker(fake, folder, plugins, SIMULATED[:1] if fake else [kind for kind in REAL if kind not in missing])
    found = [
        Step("signatures", 45, make.pytest("tests/gpu/test_cupy_api.py", "tests/gpu/test_ctypes_api.py"), PYTEST),
        *make.alone(),
        *make.raw(),
        *make.pairs(),
        *make.tests("processes", 60, "two ranks", "by_nccl", after="aiocoll"),
        *make.tests("failures", 60),
        *make.tests("streams", 50),
        *make.tests("processes", 60, "staged 2", "(2 or dies)"),
        *(step for size in (4, 8) if not fake for step in make.tests("processes", 60, f"staged {size}", str(size))),
        *make.tests("loop", 50),
        *make.tests("calls", 60),
        *make.adapters(),
        make.bench(),
    ]
    return [step._replace(limit=step.limit * SLOW) for step in found] if fake else found


def run_step(step: Step, limit: float, environment: Mapping[str, str], log: Path) -> Outcome:
    """Run a step in a process and append its output to `log`; end the process at its time limit."""
    start = monotonic()
    with log.open("ab") as output:
        where = output.tell()  # remember the end of the log, since the step's output follows
        with subprocess.Popen(
            [sys.executable, *step.words],
            cwd=ROOT,
            env={**environment, **step.environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_process(process)
    took = round(monotonic() - start, 1)
    output_text = log.read_bytes()[where:].decode(errors="replace")
    if code is None:
        return Outcome("hung", took, f"killed after {limit:g} s; the log has the stacks")
    if code:
        return Outcome(
            "failed", took, _last_line(output_text) if code > 0 else f"killed by {signal.Signals(-code).name}"
        )
    if step.words[:2] == ("-m", "pytest") and not re.search(r"\b[1-9]\d* passed", output_text):
        return Outcome("failed", took, f"no test passed: {_last_line(output_text)}")
    return Outcome("passed", took)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants; a process that still runs first writes its thread stacks."""
    family = [process.pid, *_descendants(process.pid)]
    if process.poll() is None:
        _abort_in_turn(family)
    for pid in {*family[1:], *_descendants(process.pid)}:
        _kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # descendants may have ended with their parent
        os.killpg(process.pid, signal.SIGKILL)


def _abort_in_turn(family: Sequence[int]) -> None:
    """Let processes write their stacks one after the other, so that the stacks do not mix in the log."""
    deadline = monotonic() + STACK_SECONDS
    for pid in family:
        _kill(pid, signal.SIGSTOP)  # stopped, so that no process reacts to the end of another before its turn
    for pid in family:
        with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid), "rb", buffering=0) as ended:
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
            select.select([ended], [], [], max(0.0, deadline - monotonic()))


def _kill(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(each.name))
    found, left = [], [pid]
    while left:
        started = children.get(left.pop(), [])
        found += started
        left += started
    return found


def _last_line(output_text: str) -> str:
    lines = [line.strip() for line in output_text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
