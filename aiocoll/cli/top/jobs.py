"""The jobs that `aiocoll run` has started for this user on this host: a folder each, with a file about the job in it.

The launcher locks that file while it lives. Containers may share the folder of the jobs. A process does not see those
of other containers, whose numbers may be the same, but the kernel's locks are common to all.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from aiocoll.process import GONE, UNKNOWN, ProcessId, state, this_process
from aiocoll.rendezvous.private_folder import private_folder

__all__ = ["Job", "job_folder", "jobs"]

_FOLDER, _FILE = "aiocoll-top", "job.json"


@dataclass(frozen=True, slots=True)
class Job:
    """A running job.

    Attributes:
        number: of its launcher, as that knows it itself.
        folder: in which its ranks listen.
        command: what its ranks run.
        ranks: how many of them there are on this host.
        started: by the wall clock.
    """

    number: int
    folder: str
    command: str
    ranks: int
    started: float


@contextmanager
def job_folder(env: Mapping[str, str], command: Sequence[str], ranks: int) -> Iterator[str]:
    """Make the folder of the job that this process launches, and remove it at the end.

    Args:
        env: the environment.
        command: what the ranks run.
        ranks: how many there are on this host.

    Yields:
        Its path.

    Raises:
        OSError: it cannot be made.
        RendezvousError: another user has made what should be a folder of this one.
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
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def jobs(env: Mapping[str, str]) -> list[Job]:
    """Return the jobs that run, oldest first.

    Raises:
        RendezvousError: another user has made what should be a folder of this one.
    """
    parent = os.path.join(private_folder(env), _FOLDER)
    found = []
    for folder, about, over in _read(parent):
        if not over:
            found.append(Job(about["process"][1], folder, about["command"], about["ranks"], about["started"]))
    return sorted(found, key=lambda job: job.started)


def _sweep(parent: str) -> None:
    """Remove the folders of launchers that were killed."""
    for folder, _, over in _read(parent):
        if over:
            shutil.rmtree(folder, ignore_errors=True)


def _read(parent: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield the folder of each job, what its file says, and whether its launcher has ended."""
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):
            folder = os.path.join(parent, name)
            with (
                suppress(OSError, ValueError, KeyError, TypeError),
                open(os.path.join(folder, _FILE), encoding="utf-8") as file,
            ):
                about = json.load(file)
                yield folder, about, _is_over(about, file)


def _is_over(about: Mapping[str, Any], file: TextIO) -> bool:
    """Return whether the launcher has ended. In another container only its lock shows that, if it holds one."""
    found = state(ProcessId._make(about["process"]))
    if found != UNKNOWN:
        return found == GONE
    return about["locked"] and _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _lock(file: TextIO, operation: int) -> bool:
    """Return whether the lock could be taken: some file systems have none."""
    try:
        fcntl.flock(file, operation)
    except OSError:
        return False
    return True
