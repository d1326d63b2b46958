"""What the kernel tells of other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiocoll.process import GONE, STOPPED, ProcessId, state, this_process

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")

#: Takes its place in the kernel's books under a name made to confuse, says who it is, and waits.
CHILD = """
import pathlib, sys
from aiocoll.process import this_process
pathlib.Path("/proc/self/comm").write_text(") Z (x) R")
print(*this_process(), flush=True)
sys.stdin.read()
"""


@contextmanager
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessId]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, ProcessId(*map(int, process.stdout.readline().split()))
        finally:
            process.kill()


def test_this_process_runs() -> None:
    assert this_process().pid == os.getpid()
    assert state(this_process()) == "running"


def test_a_process_stops_goes_on_and_ends() -> None:
    with child() as (process, identity):
        assert identity.namespace == this_process().namespace
        assert state(identity) in ("sleeping", "running")
        for number, flag in ((signal.SIGSTOP, os.WUNTRACED), (signal.SIGCONT, os.WCONTINUED)):
            process.send_signal(number)
            os.waitpid(process.pid, flag)
            assert (state(identity) == STOPPED) == (number == signal.SIGSTOP)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state(identity) == GONE, "though its parent has not asked yet"
        process.wait()
        assert state(identity) == GONE


def test_a_later_process_of_the_same_number_is_another_one() -> None:
    assert state(this_process()._replace(started=this_process().started - 1)) == GONE
