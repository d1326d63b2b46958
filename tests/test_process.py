"""Detection of ended processes: an end needs a proof, and an error of the observer is no proof."""

from __future__ import annotations

import errno
import io
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from aiocoll import process as processes
from aiocoll.process import (
    GONE,
    STOPPED,
    UNKNOWN,
    PidFd,
    ProcessId,
    open_pidfd,
    peer_id,
    peer_process,
    state,
    this_process,
)

from .internals import replace_call

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")

#: A child program that prints its identity and waits. Its name in /proc looks like other fields of the stat file.
CHILD = """
import pathlib, sys
from aiocoll.process import this_process
pathlib.Path("/proc/self/comm").write_text(") Z (x) R")
print(*this_process(), flush=True)
sys.stdin.read()
"""


@contextmanager
def child_process() -> Iterator[tuple[subprocess.Popen[str], ProcessId]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, ProcessId(*map(int, process.stdout.readline().split()))
        finally:
            process.kill()


def test_state_of_this_process_is_running() -> None:
    assert this_process().pid == os.getpid()
    assert state(this_process()) == "running"


def test_stop_continuation_and_end_of_a_process_are_observed() -> None:
    with child_process() as (process, identity):
        assert identity.namespace == this_process().namespace
        assert state(identity) in ("sleeping", "running")
        for number, flag in ((signal.SIGSTOP, os.WUNTRACED), (signal.SIGCONT, os.WCONTINUED)):
            process.send_signal(number)
            os.waitpid(process.pid, flag)
            assert (state(identity) == STOPPED) == (number == signal.SIGSTOP)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert state(identity) == GONE, "a zombie counts as running"
        process.wait()
        assert state(identity) == GONE


def test_process_counts_as_ended_if_a_later_process_has_its_pid() -> None:
    assert state(this_process()._replace(started=this_process().started - 1)) == GONE


#: Error numbers caused by the observer, such as a lack of descriptors, and not by the observed process.
OWN_ERRORS = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO, errno.EAGAIN, errno.EINTR]
#: The number of the system call that ends a single thread.
SYS_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine())


@pytest.fixture(scope="module")
def living_process() -> Iterator[tuple[ProcessId, PidFd]]:
    """Yield the identity of a running child process, and its pidfd."""
    with child_process() as (_, identity):
        pidfd = open_pidfd(identity)
        assert pidfd is not None
        yield identity, pidfd
        pidfd.close()


@pytest.fixture(scope="module")
def ended_process() -> Iterator[tuple[ProcessId, PidFd]]:
    """Yield the identity of an ended and reaped child process, and a pidfd opened while the child ran."""
    with child_process() as (process, identity):
        pidfd = open_pidfd(identity)
        assert pidfd is not None
        process.kill()
        process.wait()
    yield identity, pidfd
    pidfd.close()


@contextmanager
def failing_calls(number: int, *names: str) -> Iterator[None]:
    """Make functions fail with an error number if `aiocoll.process` calls them, such as "open" or "os.kill"."""
    with ExitStack() as stack:
        for name in names:
            fault = mock.Mock(side_effect=OSError(number, os.strerror(number)))
            stack.enter_context(replace_call("aiocoll.process", name, lambda _, fault=fault: fault))
        yield


@pytest.mark.parametrize("number", OWN_ERRORS)
@pytest.mark.parametrize("names", [("open",), ("select.poll",), ("os.kill",), ("open", "os.kill"), ("os.stat", "open")])
@pytest.mark.parametrize("with_pidfd", [False, True])
def test_living_process_is_never_reported_as_ended(
    number: int, names: tuple[str, ...], with_pidfd: bool, living_process: tuple[ProcessId, PidFd]
) -> None:
    with failing_calls(number, *names):
        assert state(*living_process[: 1 + with_pidfd]) != GONE


@pytest.mark.parametrize("number", OWN_ERRORS)
@pytest.mark.parametrize("names", [("open",), ("select.poll",), ("select.poll", "open"), ("os.kill",)])
def test_one_proof_suffices_to_report_an_ended_process(
    number: int, names: tuple[str, ...], ended_process: tuple[ProcessId, PidFd]
) -> None:
    with failing_calls(number, *names):
        assert state(*ended_process) == GONE


@pytest.mark.parametrize("number", OWN_ERRORS)
def test_failed_observations_do_not_prove_the_end_of_a_process(
    number: int, ended_process: tuple[ProcessId, PidFd]
) -> None:
    with failing_calls(number, "open", "select.poll", "os.kill"):
        assert state(*ended_process) == UNKNOWN


def test_process_whose_proc_entry_is_hidden_is_not_reported_as_ended(living_process: tuple[ProcessId, PidFd]) -> None:
    """Simulate a /proc mounted with the option `hidepid`, which hides processes of other users."""
    with failing_calls(errno.ENOENT, "open"):
        assert state(living_process[0]) == UNKNOWN


def test_proc_mounted_in_another_pid_namespace_does_not_prove_the_end_of_a_process() -> None:
    other = this_process()._replace(started=this_process().started - 1)
    real = open

    def open_status(path: str, mode: str) -> Any:
        if path == "/proc/self/status":
            return io.BytesIO(b"NSpid:\t4711\t%d\n" % os.getpid())
        return real(path, mode)

    with mock.patch.object(processes, "open", open_status, create=True):
        assert state(other) == UNKNOWN


def test_state_of_a_process_in_another_pid_namespace_is_unknown() -> None:
    elsewhere = this_process()._replace(namespace=this_process().namespace + 1, pid=(1 << 22) - 1)
    assert state(elsewhere) == UNKNOWN
    assert state(elsewhere._replace(namespace=0)) == UNKNOWN
    pidfd = PidFd(os.pidfd_open(os.getpid()))
    assert state(elsewhere, pidfd) == state(None, pidfd) == "alive"
    assert state(this_process()._replace(started=0), pidfd) == "alive", "the state of a pidfd depends on the start time"
    pidfd.close()


@pytest.mark.parametrize("pid", [-1, 0, 1 << 40, -(1 << 70)])
def test_state_of_an_impossible_pid_is_unknown(pid: int) -> None:
    """Check pids that a peer could send in its card; `kill` would take some of them for process groups."""
    assert state(this_process()._replace(pid=pid)) == UNKNOWN


def test_pidfd_shows_that_a_zombie_process_has_ended() -> None:
    with child_process() as (process, identity):
        pidfd = open_pidfd(identity)
        assert pidfd is not None
        assert pidfd.has_ended() is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pidfd.has_ended() is True
        pidfd.close()
        assert pidfd.has_ended() is None


def test_end_of_a_process_is_detected_without_pidfd_send_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a Python without `signal.pidfd_send_signal`, built with headers of an older kernel."""
    with child_process() as (process, identity):
        pidfd = open_pidfd(identity)
        assert pidfd is not None
        monkeypatch.delattr(signal, "pidfd_send_signal")
        assert pidfd.has_ended() is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert pidfd.has_ended() is True
        pidfd.close()


def test_another_file_with_the_number_of_a_pidfd_does_not_prove_the_end_of_a_process() -> None:
    """Open another file with the descriptor number of the pidfd, as after a program has closed all files."""
    with child_process() as (_, identity):
        pidfd = open_pidfd(identity)
        assert pidfd is not None
        reading, writing = os.pipe()
        os.write(writing, b"x")
        for inodes_differ in (True, False):
            os.dup2(reading, pidfd._fd)
            if not inodes_differ:  # before Linux 6.9, all pidfds had the same inode
                pidfd._file = os.fstat(pidfd._fd)
            assert pidfd.has_ended() is None
            assert state(identity, pidfd) != GONE
        for each in (reading, writing):
            os.close(each)
        pidfd.close()


@pytest.mark.skipif(SYS_EXIT is None, reason="needs the number of a system call, which is unknown for this processor")
def test_process_whose_main_thread_has_ended_is_reported_as_alive() -> None:
    program = f"""
import ctypes, sys, threading
from aiocoll.process import this_process
print(*this_process(), flush=True)
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall({SYS_EXIT}, 0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        identity = ProcessId(*map(int, process.stdout.readline().split()))
        pidfd = open_pidfd(identity)
        entry = Path(f"/proc/{process.pid}/stat")
        while " Z " not in entry.read_text():
            assert state(identity, pidfd) != GONE
        assert state(identity) == state(identity, pidfd) == "sleeping"
        process.kill()
    assert state(identity, pidfd) == GONE
    assert pidfd is not None
    pidfd.close()


def test_pidfd_is_not_opened_if_a_later_process_has_the_pid() -> None:
    assert open_pidfd(this_process()._replace(started=this_process().started - 1)) is None


def test_unix_socket_identifies_the_peer_process() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_id(one) == this_process()
        pidfd = peer_process(one)
        if pidfd is not None:  # needs Linux 6.5
            assert pidfd.has_ended() is False
            pidfd.close()
