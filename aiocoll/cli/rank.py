"""`RankProcess`, the launcher's handle of one rank's process: start, reports, signals and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aiocoll.cli.output import OutputRelay
from aiocoll.cli.sink import Sink

__all__ = ["DRAIN", "ElasticReport", "Exit", "RankProcess", "Report"]

#: Seconds to wait for the remaining output of an ended rank. It takes longer only if a child keeps the pipe open.
DRAIN = 1.0
_START = str(Path(__file__).with_name("start.py"))
#: Lines of /proc/PID/status with the signals that a process blocks, ignores and handles.
_EXPECTED = ("SigBlk", "SigIgn", "SigCgt")


class Report(NamedTuple):
    """A report of an exception that a rank's program did not catch; `aiocoll.cli.start` describes the fields."""

    rank: int
    time: float
    degree: int
    code: int | None
    error: str
    place: str
    late: list[int]
    group: str
    traceback: str

    @property
    def kind(self) -> str:
        """Return the name of the exception's class, without its module."""
        return self.error.partition(":")[0].rpartition(".")[2]

    @property
    def error_and_place(self) -> str:
        """Return the exception with its message, and the line of the program that raised it."""
        return f"{self.error} ({self.place})" if self.place else self.error

    @property
    def kind_and_place(self) -> str:
        """Return the class of the exception, without its message, and the line of the program that raised it."""
        return f"{self.kind} ({self.place})" if self.place else self.kind


class ElasticReport(NamedTuple):
    """A report by a rank that it is in an elastic group; see `aiocoll.launcher`."""

    rank: int


class Exit(NamedTuple):
    """A report that a rank's process has ended.

    Attributes:
        rank: number of the rank.
        time: time at which the launcher noticed the end.
        code: the exit code, or -n for signal n.
        by_launcher: whether the launcher sent the signal.
    """

    rank: int
    time: float
    code: int
    by_launcher: bool


class RankProcess:
    """The process of a rank, which leads its own process group.

    Ctrl-C in a terminal therefore only reaches the launcher, which forwards it once to each rank and its children. On
    Linux the rank dies with the launcher, however the launcher ends.

    Args:
        rank: number of the rank.
        command: the arguments of the Python interpreter.
        environment: the environment, without the descriptor of the key's pipe.
        key: the content of that pipe.
        logs: files that receive a copy of its standard output and error, or None.
        notify: called from another thread, with each report and then with the exit.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        key: bytes,
        logs: tuple[Sink, Sink] | None,
        notify: Callable[[Report | ElasticReport | Exit], object],
    ) -> None:
        self.rank = rank
        self._notify = notify
        self._logs = logs
        self._sent: set[signal.Signals] = set()
        fd = _pipe_with(key)
        self._reports, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, _START, str(os.getpid()), str(theirs), *command],
                env={**environment, "AIOCOLL_JOB_KEY_FD": str(fd)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(fd, theirs),
                process_group=0,
            )
        except BaseException:
            os.close(self._reports)
            os.close(theirs)
            raise
        finally:
            os.close(fd)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        prefix = b"[%d] " % rank
        out, err = logs or (None, None)
        self._relays = [
            OutputRelay(prefix, self._process.stdout, sys.stdout.buffer, out),
            OutputRelay(prefix, self._process.stderr, sys.stderr.buffer, err),
        ]
        self._listeners = [
            threading.Thread(target=self._wait, args=(theirs,), name=f"rank-{rank}-end", daemon=True),
            threading.Thread(target=self._listen, name=f"rank-{rank}-reports", daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    @property
    def pid(self) -> int:
        """Return the process id of the rank."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank and its children."""
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._sent.add(number)
                os.killpg(self._process.pid, number)

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to the rank alone. If the signal would end the rank, send nothing and return False."""
        if self._process.returncode is not None or not _expects(self._process.pid, number):
            return False
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        return True

    def kill(self) -> None:
        """Kill the rank and its children, if they still exist."""
        self.send(signal.SIGKILL)

    def kill_children(self) -> None:
        """Kill the processes that the ended rank has left in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def drain(self, deadline: float) -> None:
        """Wait for the end of the rank and of its output; kill children that keep the pipes open after `deadline`."""
        self._process.wait()
        for listener in self._listeners:
            listener.join()
        for relay in self._relays:
            relay.join(max(0.0, deadline - time.monotonic()))
        if any(relay.is_alive() for relay in self._relays):
            self.kill_children()
            for relay in self._relays:
                relay.drain()
        for log in self._logs or ():
            log.close()

    def _wait(self, reports: int) -> None:
        """Wait for the exit; write the exit code into the report pipe, because a child may keep that pipe open."""
        code = self._process.wait()
        with open(reports, "w", encoding="ascii") as pipe:
            pipe.write(f"\n{json.dumps({'time': time.monotonic(), 'code': code, 'ended': True})}\n")

    def _listen(self) -> None:
        traceback = ""
        with open(self._reports, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                try:
                    fields = json.loads(line)
                except ValueError:  # an empty line, or a line cut short by the end of the rank
                    continue
                if fields.pop("ended", False):
                    self._notify(Exit(self.rank, **fields, by_launcher=-fields["code"] in self._sent))
                    break
                if fields.pop("elastic", False):
                    self._notify(ElasticReport(self.rank))
                    continue
                report = Report(self.rank, **fields)
                traceback = report.traceback
                self._notify(report)
        if self._logs is not None and traceback:
            # The launcher writes the traceback to the log, because the rank has not. Other output must come first.
            self._relays[1].join(DRAIN)
            self._logs[1].write(traceback.encode(errors="replace"))


def _expects(pid: int, number: signal.Signals) -> bool:
    """Return whether a process handles, blocks or ignores a signal; True where the system does not report it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return not Path("/proc/self/status").exists()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(_EXPECTED)]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _pipe_with(key: bytes) -> int:
    """Return the reading end of a pipe that contains `key` and whose writing end is closed."""
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        pipe.write(key)
    return reading
