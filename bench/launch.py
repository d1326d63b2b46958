"""Launches of a benchmark: start of the processes, waiting for them, clean-up, and repetition under load."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from inflight import Case
from systems import System

from aiocoll.cli.measure import Effort, Timing
from aiocoll.machine_load import LoadMeter, MachineLoad

RANK = str(Path(__file__).with_name("rank.py"))
#: Seconds in which ranks have to end after one of them has failed.
GRACE = 2.0
#: Seconds between two polls of the processes.
POLL = 0.05
#: Variables without which Open MPI refuses to run as root; a container may have no other user.
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


T = TypeVar("T")
#: The timings of the measured cases.
CaseTimings = Mapping[Case, Timing]


@dataclass(frozen=True)
class Launch(Generic[T]):
    """The result of a launch: timings, or the reason of its failure; and the load of the machine.

    Attributes:
        timings: what the launch has measured, up to a failure; `CaseTimings` for `launch`.
        failure: reason of the failure, or None.
        seconds: its duration.
        load: load of the machine during the launch; None if it was not measured.
        repeats: earlier launches that this one replaces, since the load was high.
    """

    timings: T
    failure: str | None
    seconds: float
    load: MachineLoad | None = None
    repeats: int = 0


class Place(Protocol):
    """The interface of a launch environment: the hosts of the ranks, and the way in which ranks meet."""

    def config(self, system: System) -> dict[str, Any]:
        """Return the entries that this environment adds to the configuration of the ranks."""

    def commands(self, system: System, python: str, folder: str, world_size: int) -> list[list[str]]:
        """Return the commands that start the ranks, whose files are in `folder`."""


class OneHost:
    """A launch on this host, whose ranks meet through a file."""

    def config(self, system: System) -> dict[str, Any]:
        return {"method": None, "interface": "lo", "encryption": "auto"}

    def commands(self, system: System, python: str, folder: str, world_size: int) -> list[list[str]]:
        if system.mpiexec is None:
            return [[python, RANK, folder, str(rank)] for rank in range(world_size)]
        mpiexec = str(Path(python).with_name("mpiexec"))
        return [[mpiexec, *system.mpiexec, "-n", str(world_size), python, RANK, folder]]


def launch(
    system: System,
    python: Path | None,
    world_size: int,
    cases: Sequence[Case],
    effort: Effort,
    limit: int,
    place: Place | None = None,
) -> Launch[CaseTimings]:
    """Start `world_size` processes that measure `cases` with `system`; return their results.

    Args:
        system: the system to run.
        python: the Python of its environment; None means this one.
        world_size: number of ranks.
        cases: the cases, in this order.
        effort: the effort for each case.
        limit: seconds for the whole launch.
        place: the hosts of the ranks; this host by default.
    """
    place = place or OneHost()
    start = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        config = {
            "library": system.library,
            "mode": system.mode,
            "transport": system.transport,
            "world_size": world_size,
            "job_key": secrets.token_hex(16),
            "cases": cases,
            "effort": effort,
            "limit": limit,
        } | place.config(system)
        (folder / "config.json").write_text(json.dumps(config))
        stack.callback(_end_strangers, folder)
        # Do not pass on asyncio's debug mode, which would make aiocoll slower.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
        environment |= MPI_ENVIRONMENT | system.variables
        processes = []
        errors = []  # one file per process, so that lines do not mix
        for command in place.commands(system, str(python or sys.executable), str(folder), world_size):
            errors.append(stack.enter_context(open(folder / f"errors.{len(errors)}", "w+")))
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors[-1],
                stderr=errors[-1],
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
            processes.append(process)
            stack.callback(_end, process)
        failure = _failure(processes, start + limit, limit)
        timings = _timings(folder / "results", cases)
        if failure is None and len(timings) < len(cases):
            failure = "ended early"
        if failure is not None:
            for file in errors:
                file.seek(0)
            failure = _reason(failure, "".join(file.read() for file in errors))
    return Launch(timings, failure, time.monotonic() - start)


def launch_until_quiet(start: Callable[[], Launch[T]], meter: LoadMeter, repeats: int) -> Launch[T]:
    """Repeat a launch while the load of the machine is high; return the launch with the least load.

    Args:
        start: launches once.
        meter: measures the load during each launch.
        repeats: the number of further launches, at most.
    """
    launches: list[Launch[T]] = []
    while len(launches) <= repeats:
        meter.lap()
        launches.append(replace(start(), load=(load := meter.lap())))
        if launches[-1].failure is not None or not load.is_high:
            break
    best = min(launches, key=lambda each: (each.failure is not None, each.load.total or 0.0))
    return replace(best, repeats=len(launches) - 1)


def run_all(commands: Sequence[Sequence[str]], folder: str, limit: int) -> list[str] | str:
    """Run processes together in a folder; return the output of each, or the reason why the launch failed.

    Args:
        commands: one command per process.
        folder: their working directory.
        limit: seconds after which they are killed.
    """
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = [subprocess.Popen(each, cwd=folder, stdout=pipe, stderr=pipe, text=True) for each in commands]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        try:
            outputs = [process.communicate(timeout=limit) for process in processes]
        except subprocess.TimeoutExpired:
            return f"not done after {limit} s"
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            return (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return [output for output, _ in outputs]


def _failure(processes: Sequence[subprocess.Popen[bytes]], deadline: float, limit: int) -> str | None:
    """Wait until all processes have ended; return the first failure as text, or None."""
    failed: str | None = None
    while any(process.poll() is None for process in processes):
        codes = [process.returncode for process in processes]
        if failed is None and any(codes):
            failed, deadline = _ending(codes), min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return failed or f"not done after {limit} s"
        time.sleep(POLL)
    return failed or _ending([process.returncode for process in processes])


def _ending(codes: Sequence[int | None]) -> str | None:
    for code in codes:
        if code:
            return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return None


def _reason(failure: str, output: str) -> str:
    """Return the failure in one line, with the first exception in the output, else with its first line."""
    lines = [line.strip().replace("|", "/") for line in output.splitlines() if re.search("[A-Za-z]", line)]
    lines = [re.sub(r"^\[rank\d+\]: *", "", line) for line in lines]  # torch's prefix of each line
    reason = next((line for line in lines if re.match(r"[\w.]*Error\b", line)), lines[0] if lines else "")
    return f"{failure}: {reason}" if reason else failure


def _timings(path: Path, cases: Sequence[Case]) -> dict[Case, Timing]:
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            result = json.loads(line)
            found[cases[result["index"]]] = Timing(result["nanoseconds"], result["cpu"], result["wrong"])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # mpiexec ends its ranks then
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    process.kill()
    process.wait()


def _end_strangers(folder: Path) -> None:
    """Kill ranks that mpiexec has started and left running; they are not children of this process."""
    for file in folder.glob("*.pid"):
        with suppress(OSError):
            command = Path(f"/proc/{file.stem}/cmdline").read_bytes().split(b"\0")
            if RANK.encode() in command and str(folder).encode() in command:
                os.kill(int(file.stem), signal.SIGKILL)
