"""The steps of `run.py`, in the order in which they tell most about a machine that nobody knows, and how one is run."""

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

from tests.gpu.kinds import ADAPTER, ADAPTERS, PLAYED, REAL

ROOT = Path(__file__).parents[2]
#: Seconds that processes which hang have to write the stacks of their threads.
LAST_WORDS = 3.0
#: CUDA would load kernels while others run, for which it waits for them. Not with torch: to load all of torch's takes
#: many seconds, in each process.
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}

#: How much longer steps may take on the fake device: that is no machine for this, but any, which others use as well.
SLOW = 2

#: What two ranks do by each adapter, see `on_device/ours.py`.
PAIRED = ("sum", "killed", "aborted", "mismatched", "crossed", "queued")
#: What tests import, also those that are not run by pytest; and what those need that are.
TESTS = ("nccl", "pytest", "ml_dtypes")
PYTEST = (*TESTS, "pytest_asyncio")


class Step(NamedTuple):
    """One process.

    Attributes:
        name: of the step.
        limit: seconds it may take.
        words: what to run, behind the name of the Python.
        needs: without which it is not run.
        after: the step without which this one cannot pass.
        environment: what it needs there.
    """

    name: str
    limit: float
    words: Sequence[str]
    needs: Sequence[str] = ()
    after: str | None = None
    environment: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How a step has ended.

    Attributes:
        state: "passed", "failed", "hung", "left out" or "not run"; all but the first and "left out" are failures.
        seconds: it took.
        why: in words.
    """

    state: str
    seconds: float = 0.0
    why: str = ""


class _Maker(NamedTuple):
    """Makes steps.

    Attributes:
        fake: on the fake device.
        folder: for what they write.
        plugins: what pytest has to be told.
        there: what arrays can be made of here; one of them is enough for some steps.
    """

    fake: bool
    folder: Path
    plugins: Sequence[str]
    there: Sequence[str]

    @property
    def kinds(self) -> Sequence[str]:
        """What arrays are made of, there or not."""
        return PLAYED if self.fake else REAL

    @property
    def raw_by(self) -> str:
        """What calls NCCL in the step without which no other of two ranks can pass."""
        return "library" if self.there[0] == "torch" else self.there[0]

    def needed(self, kind: str) -> Sequence[str]:
        """Return what a kind needs; what is played needs nothing."""
        return () if self.fake else (kind,)

    def pytest(self, *more: str) -> Sequence[str]:
        return ("-m", "pytest", "-q", *self.plugins, "-W", "default", *more)

    def alone(self) -> Iterator[Step]:
        """One rank, for arrays of each kind."""
        for kind in self.kinds:
            needs = (*TESTS, *self.needed(kind))
            yield Step(f"alone {kind}", 45, ("-m", "tests.gpu.on_device.alone", kind), needs)

    def two(
        self, name: str, module: str, how: str, after: str | None = "ours", kind: str = "", **environment: str
    ) -> Step:
        """Two ranks on one device."""
        words = ("-m", "tests.gpu.on_device.two", module, how, kind or self.there[0], str(self.folder))
        return Step(name, 55, words, TESTS, after, environment)

    def raw(self) -> Iterator[Step]:
        """Two ranks on one device without anything of ours in between: by CuPy, and by libnccl."""
        kind = self.kinds[0]
        step = self.two(f"raw by {kind}", "raw", kind, None, kind)
        yield step._replace(needs=(*step.needs, *self.needed(kind)))
        step = self.two("raw by library", "raw", "library", None, "played" if self.fake else "")
        yield step._replace(needs=(*step.needs, *self.needed("ctypes")))

    def pairs(self) -> Iterator[Step]:
        """Two ranks on one device, by aiocoll."""
        yield self.two("ours", "ours", "sum", after=f"raw by {self.raw_by}")
        yield from (self.two(how, "ours", how) for how in PAIRED[1:])
        yield self.two("compared before", "ours", "sum", AIOCOLL_VERIFY="before")
        yield self.two("exit with RAS", "ours", "sum", NCCL_RAS_ENABLE="1")
        yield self.two("exit with RAS unclosed", "ours", "left", NCCL_RAS_ENABLE="1")
        if self.fake:
            for how in PAIRED:
                yield self.two(f"{how} played", "ours", how, "raw by library", "played")

    def tests(
        self, file: str, limit: float, name: str = "", chosen: str = "", after: str | None = None
    ) -> Iterator[Step]:
        """Tests of a file, or those chosen of them, for arrays of each kind."""
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
        """Run by ctypes what has run by CuPy, or all without CuPy; on the fake device, run all by each."""
        for adapter in ADAPTERS if self.fake else ADAPTERS[1:]:
            yield from self.adapter(adapter)

    def adapter(self, adapter: str) -> Iterator[Step]:
        kind, by = self.there[-1], {ADAPTER: adapter}
        more = () if self.fake else ("cupy", "ctypes")
        steps = [
            Step(f"alone {kind}", 45, ("-m", "tests.gpu.on_device.alone", kind), TESTS),
            *(self.two(how, "ours", how, kind=kind) for how in PAIRED),
            *(step for step in self.tests("streams", 50) if step.name.endswith(kind)),
        ]
        if self.fake:  # of a real one there are not enough
            words = self.pytest("tests/gpu/test_overlapping.py", "-k", "rows or kinds or first_group or fails")
            steps.append(Step("overlapping", 50, words, PYTEST))
        for step in steps:
            name, environment = f"{step.name} by {adapter}", {**step.environment, **by}
            yield step._replace(name=name, needs=(*step.needs, *more), environment=environment)

    def bench(self) -> Step:
        words = ("bench/gpu.py", "--quick", *(["--fake"] if self.fake else ["--kind", self.there[0]]))
        output = ("--output", f"{self.folder}/RESULTS-gpu.md")
        return Step("bench", 60, (*words, *output), (*TESTS, "uvloop"))


def steps(fake: bool, folder: Path, plugins: Sequence[str], missing: Container[str]) -> list[Step]:
    """Return what is to be run, in order.

    Args:
        fake: on the fake device.
        folder: for what they write.
        plugins: what pytest has to be told.
        missing: names of what there is not.
    """
    make = _Maker(fake, folder, plugins, PLAYED[:1] if fake else [kind for kind in REAL if kind not in missing])
    found = [
        Step("signatures", 45, make.pytest("tests/gpu/test_cupy_api.py", "tests/gpu/test_ctypes_api.py"), PYTEST),
        *make.alone(),
        *make.raw(),
        *make.pairs(),
        *make.tests("processes", 60, "two ranks", "by_nccl", after="ours"),
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


def carry_out(step: Step, limit: float, environment: Mapping[str, str], log: Path) -> Ended:
    """Run a step, and write what it says behind what is in `log`; one that hangs leaves the stacks of its threads."""
    start = monotonic()
    with log.open("ab") as output:
        where = output.tell()  # before the process moves that on
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
                end(process)
    took = round(monotonic() - start, 1)
    said = log.read_bytes()[where:].decode(errors="replace")
    if code is None:
        return Ended("hung", took, f"it was killed after {limit:g} s; the stacks are in the log")
    if code:
        return Ended("failed", took, _last(said) if code > 0 else f"killed by {signal.Signals(-code).name}")
    if step.words[:2] == ("-m", "pytest") and not re.search(r"\b[1-9]\d* passed", said):
        return Ended("failed", took, f"no test has passed: {_last(said)}")
    return Ended("passed", took)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started: by a signal at which each writes its stacks, then for good."""
    family = [process.pid, *_descendants(process.pid)]
    if process.poll() is None:
        _abort(family)
    for pid in {*family[1:], *_descendants(process.pid)}:
        _kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # what was its child, and has lost its parent
        os.killpg(process.pid, signal.SIGKILL)


def _abort(family: Sequence[int]) -> None:
    """Have processes write their stacks one after another: what they write at once would be mixed in their log."""
    deadline = monotonic() + LAST_WORDS
    for pid in family:
        _kill(pid, signal.SIGSTOP)  # what has not come to its turn does not react to the end of the others
    for pid in family:
        with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid), "rb", buffering=0) as ended:
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
            select.select([ended], [], [], max(0.0, deadline - monotonic()))


def _kill(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and that those have."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(each.name))
    found, left = [], [pid]
    while left:
        mine = children.get(left.pop(), [])
        found += mine
        left += mine
    return found


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it has said nothing"
