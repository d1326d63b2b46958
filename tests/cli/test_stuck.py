"""Detection of stuck ranks, with the reason: stopped, blocked, or silent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiocoll.cli.stuck import find_stuck
from aiocoll.top import folder as folders
from aiocoll.top import listener

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds unix sockets through /proc")

SLEEPS = "import signal; signal.pause()"


class Group:
    """A stand-in for a group of this process, as `aiocoll top` reports groups."""

    def __init__(self, blocked: tuple[float, str] | None) -> None:
        self.blocked = blocked

    def to_data(self) -> dict[str, Any]:
        return {"blocked": self.blocked}


@pytest.fixture
def stopped_process() -> Iterator[int]:
    """Yield the pid of a stopped process."""
    with subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), 19); {SLEEPS}"]) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield process.pid
        process.kill()


def test_stopped_process_is_detected_as_stuck_and_running_processes_are_not(
    stopped_process: int, tmp_path: Path
) -> None:
    processes = {3: stopped_process, 4: os.getpid()}
    for folder in (None, str(tmp_path), str(tmp_path / "absent")):
        assert find_stuck(processes, folder) == {3: f"process {stopped_process} stopped, by SIGSTOP or a debugger"}


@pytest.mark.parametrize(
    ("blocked", "found"),
    [(None, {}), ((2.04, "a.py:1 in f"), {5: "event loop blocked for 2.0 s, at a.py:1 in f"})],
)
def test_process_with_a_blocked_loop_is_detected_as_stuck(
    tmp_path: Path, blocked: tuple[float, str] | None, found: dict[int, str]
) -> None:
    tmp_path.chmod(0o700)
    groups = [Group(None), Group(blocked)]
    for group in groups:
        listener.join(group, str(tmp_path), time.perf_counter)
    try:
        assert find_stuck({5: os.getpid()}, str(tmp_path)) == found
    finally:
        for group in groups:
            listener.leave(group, str(tmp_path))


def test_process_that_does_not_answer_is_detected_as_stuck(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = folders.open_folder(str(tmp_path))
    try:
        with folders.listen(folder):
            reason = f"process {os.getpid()} does not answer: one call holds the GIL, or the host has no CPU for it"
            assert find_stuck({0: os.getpid()}, str(tmp_path)) == {0: reason}
    finally:
        os.close(folder)
