"""Scenarios on forked ranks: started by a test in a process of its own, which forks the ranks of each scenario.

A run takes a fraction of a second, since nothing is imported again. What a rank says comes through a pipe; clocks of
processes of one machine agree.
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

__all__ = ["LIMIT", "Said", "Say", "play", "run_chosen", "run_forked"]

ROOT = Path(__file__).parents[2]
#: Seconds after which a run has failed; one takes less than a second, unless ranks are given up.
LIMIT = 60

Say = Callable[[dict[str, Any]], None]
#: What the ranks have said until now.
Said = list[dict[str, Any]]


def play(module: str, chosen: Sequence[int], temporary: Path) -> tuple[list[dict[str, Any]], str]:
    """Run scenarios in a process of their own; return what each has come to, and what was logged.

    Args:
        module: the program, which takes the numbers of scenarios, and prints a line of JSON for each.
        chosen: numbers of scenarios.
        temporary: an empty folder, which has to be empty at the end.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AIOCOLL_") and name != "PYTHONASYNCIODEBUG"
    }
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(chosen)],
        cwd=ROOT,
        # Threads of a linear algebra library would not survive the fork.
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
    """Run the scenarios whose numbers the command line has; print each with its result as a line of JSON."""
    for number in json.loads(sys.argv[1]):
        print(json.dumps(scenarios[number] | run(scenarios[number])), flush=True)


def run_forked(
    world_size: int,
    rank: Callable[[int, int, Say], Awaitable[None]],
    hear: Callable[[Sequence[int], Said], None] = lambda pids, said: None,
    *,
    collects: bool = False,
) -> dict[str, Any]:
    """Run forked ranks to their end; return what they have said, and the exit codes of their processes.

    Each rank checks that it leaves no file, mapping or thread behind.

    Args:
        world_size: number of ranks.
        rank: the program of a rank: gets its number, a port to meet at, and a function that says something.
        hear: called with the processes, and what was said, whenever a rank says something.
        collects: a rank collects garbage before it looks what is left: errors of calls keep the frames that had them.
    """
    port = free_port()
    reading, writing = os.pipe()
    pids = []
    for number in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            # A line is short enough to be written in one piece.
            _be_rank(rank(number, port, lambda told: os.write(writing, (json.dumps(told) + "\n").encode())), collects)
        pids.append(pid)
    os.close(writing)
    signal.alarm(LIMIT)  # ends this process; the ranks have timeouts of their own
    said: Said = []
    with open(reading) as pipe:
        for line in pipe:
            said.append(json.loads(line))
            hear(pids, said)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    signal.alarm(0)
    return {"said": said, "ends": ends}


def _be_rank(program: Any, collects: bool) -> None:
    code = 1
    try:
        before = _held()
        asyncio.run(program)
        if collects:
            gc.collect()
        assert (left := _held()) == before, left
        assert threading.enumerate() == [threading.current_thread()]
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _held() -> dict[str, str]:
    """Return the files of this process, and what it has mapped of ours."""
    fds = Path("/proc/self/fd")
    files = {fd: os.readlink(fds / fd) for fd in os.listdir(fds) if (fds / fd).is_symlink()}
    maps = Path("/proc/self/maps").read_text().splitlines()
    return files | {line.split()[0]: line.split()[5] for line in maps if "aiocoll" in line and ".so" not in line}
