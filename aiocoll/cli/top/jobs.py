"""Jobs that `aiocoll run` has started for this user on this host: one folder per job, with a file about the job.

The launcher locks that file while it lives. Containers may share the parent folder. A process cannot see processes of
other containers, and their numbers may be equal, but all containers share the kernel's locks.

When the job ends, the launcher appends the outcome to the file and removes the folder. A viewer that has opened the
file before can still read it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from aiocoll.process import GONE, UNKNOWN, ProcessId, state, this_process
from aiocoll.rendezvous.private_folder import private_folder

__all__ = ["Job", "JobFolder", "JobOutcome", "job_folder", "jobs", "open_description", "read_end"]

_FOLDER, _FILE = "aiocoll-top", "job.json"


@dataclass(frozen=True, slots=True)
class Job:
    """A running job, as its launcher has described it in a file.

    Attributes:
        number: process id of its launcher, as the launcher sees it.
        folder: the folder in which its ranks listen.
        command: the command line of its ranks.
        ranks: number of its ranks on this host.
        started: start time, by the wall clock.
    """

    number: int
    folder: str
    command: str
    ranks: int
    started: float


class JobOutcome(NamedTuple):
    """The outcome of a job: the exit code and the last messages of its launcher.

    Attributes:
        code: the exit code of the launcher.
        lines: how the ranks ended, the cause first.
    """

    code: int
    lines: tuple[str, ...]


class JobFolder(NamedTuple):
    """The folder of a job that this process launches.

    Attributes:
        path: its path.
        record_end: records the outcome of the job for viewers.
    """

    path: str
    record_end: Callable[[JobOutcome], None]


@contextmanager
def job_folder(env: Mapping[str, str], command: Sequence[str], ranks: int) -> Iterator[JobFolder]:
    """Make the folder of the job that this process launches; remove it after the block.

    Args:
        env: the environment.
        command: the command line of the ranks.
        ranks: number of ranks on this host.

    Yields:
        The folder.

    Raises:
        OSError: the folder cannot be made.
        RendezvousError: the parent folder belongs to another user.
    """
    parent = os.path.join(private_folder(env), _FOLDER)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    _sweep(parent)
    folder = os.path.join(parent, f"{os.getpid()}-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    try:
        about = {"process": this_process(), "command": " ".join(command), "ranks": ranks, "started": time.time()}
        beginning = os.path.join(folder, f".{_FILE}")
        with open(beginning, "w", encoding="utf-8") as file:
            json.dump({**about, "locked": _lock(file, fcntl.LOCK_EX)}, file)
            file.flush()
            os.rename(beginning, os.path.join(folder, _FILE))

            def record_end(end: JobOutcome) -> None:
                with suppress(OSError):
                    file.write(f"\n{json.dumps(end._asdict())}\n")
                    file.flush()

            yield JobFolder(folder, record_end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_description(folder: str) -> TextIO | None:
    """Open the file that describes a job, for `read_end`; return None if the job has no such file."""
    try:
        return open(os.path.join(folder, _FILE), encoding="utf-8")
    except OSError:
        return None


def read_end(file: TextIO) -> JobOutcome | None:
    """Read the outcome of a job from the file that `open_description` has opened; None while the job runs."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        file.seek(0)
        found = json.loads(file.read().splitlines()[1])
        return JobOutcome(found["code"], tuple(found["lines"]))
    return None


def jobs(env: Mapping[str, str]) -> list[Job]:
    """Return this user's running jobs on this host, oldest first.

    Raises:
        RendezvousError: the parent folder belongs to another user.
    """
    parent = os.path.join(private_folder(env), _FOLDER)
    found = []
    for folder, about, over in _read(parent):
        if not over:
            found.append(Job(about["process"][1], folder, about["command"], about["ranks"], about["started"]))
    return sorted(found, key=lambda job: job.started)


def _sweep(parent: str) -> None:
    """Remove the folders that killed launchers have left behind."""
    for folder, _, over in _read(parent):
        if over:
            shutil.rmtree(folder, ignore_errors=True)


def _read(parent: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield for each job its folder, the content of its description, and whether its launcher has ended."""
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):
            folder = os.path.join(parent, name)
            with (
                suppress(OSError, ValueError, KeyError, TypeError),
                open(os.path.join(folder, _FILE), encoding="utf-8") as file,
            ):
                about = json.loads(file.readline())
                yield folder, about, _has_launcher_ended(about, file)


def _has_launcher_ended(about: Mapping[str, Any], file: TextIO) -> bool:
    """Return whether the launcher has ended. If it runs in another container, only its file lock shows this."""
    found = state(ProcessId._make(about["process"]))
    if found != UNKNOWN:
        return found == GONE
    return about["locked"] and _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _lock(file: TextIO, operation: int) -> bool:
    """Lock a file; return False if another process holds the lock, or if the file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError:
        return False
    return True
