"""Scenarios on forked ranks: a separate process forks the ranks of each scenario.

A run takes a fraction of a second, because a fork imports nothing. Ranks send their reports through a pipe. The clocks
of processes on one machine agree.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.ports import free_port

__all__ = ["LIMIT", "Report", "Reports", "run_chosen", "run_forked", "run_scenarios"]

ROOT = Path(__file__).parents[2]
#: Seconds after which a run has failed. A run takes less than 1 s, unless ranks wait until a rank is declared lost.
LIMIT = 60

Report = Callable[[dict[str, Any]], None]
#: The reports that the ranks have sent so far.
Reports = list[dict[str, Any]]


def run_scenarios(module: str, chosen: Sequence[int], temporary: Path) -> tuple[list[dict[str, Any]], str]:
    """Run scenarios in a separate process; return the result of each, and the log.

    Args:
        module: the program, which takes the numbers of scenarios, and prints a line of JSON for each.
        chosen: numbers of scenarios.
        temporary: an empty folder, which must be empty at the end.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AIOCOLL_") and name != "PYTHONASYNCIODEBUG"
    }
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(chosen)],
        cwd=ROOT,
        # Threads of a linear algebra library do not survive a fork.
        env=environment | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "error", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT + 15 * len(chosen),
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert not list(temporary.iterdir())
    assert not list(Path("/dev/shm").glob("aiocoll*"))
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def run_chosen(scenarios: Sequence[dict[str, Any]], run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run the scenarios whose numbers are on the command line; print each with its result as a line of JSON."""
    for number in json.loads(sys.argv[1]):
        print(json.dumps(scenarios[number] | run(scenarios[number])), flush=True)


def run_forked(
    world_size: int,
    rank: Callable[[int, int, Report], Awaitable[None]],
    on_report: Callable[[Sequence[int], Reports], None] = lambda pids, reports: None,
    *,
    collects: bool = False,
) -> dict[str, Any]:
    """Fork the ranks of a scenario, and wait until all have ended; return their reports and exit codes.

    Each rank checks that it leaves no file, mapping or thread behind.

    Args:
        world_size: number of ranks.
        rank: the program of a rank, called with its number, a port to meet at, and a function that sends a report.
        on_report: called with the process ids and all reports, whenever a rank sends one.
        collects: whether a rank collects garbage before the check, because errors keep the frames of their calls.
    """
    port = free_port()
    reading, writing = os.pipe()
    pids = []
    for number in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            # All ranks write to one pipe without a lock: a report is short enough for one atomic write.
            _run_rank(
                rank(number, port, lambda report: os.write(writing, (json.dumps(report) + "\n").encode())), collects
            )
        pids.append(pid)
    os.close(writing)
    signal.alarm(LIMIT)  # the alarm ends this process; the ranks have separate timeouts
    reports: Reports = []
    with open(reading) as pipe:
        for line in pipe:
            reports.append(json.loads(line))
            on_report(pids, reports)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    signal.alarm(0)
    return {"reports": reports, "ends": ends}


def _run_rank(program: Any, collects: bool) -> None:
    code = 1
    try:
        before = _resources()
        asyncio.run(program)
        if collects:
            gc.collect()
        assert (left := _resources()) == before, left
        assert threading.enumerate() == [threading.current_thread()]
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _resources() -> dict[str, str]:
    """Return the open files of this process, and its mappings of aiocoll's memory."""
    fds = Path("/proc/self/fd")
    files = {fd: os.readlink(fds / fd) for fd in os.listdir(fds) if (fds / fd).is_symlink()}
    maps = Path("/proc/self/maps").read_text().splitlines()
    return files | {line.split()[0]: line.split()[5] for line in maps if "aiocoll" in line and ".so" not in line}
