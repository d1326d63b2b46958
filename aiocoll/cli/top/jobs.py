"""The jobs of this user on this host that `aiocoll run` has started: a folder each, with a file about the job in it.

The launcher locks that file as long as it lives: containers may share the folder of the jobs, and a process sees
nothing of those in other containers, whose numbers may be the same, but the kernel's locks are the same for all.
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
        about = {"number": os.getpid(), "command": " ".join(command), "ranks": ranks, "started": time.time()}
        beginning = os.path.join(folder, f".{_FILE}")
        with open(beginning, "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump(about, file)
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
    for folder, file in _files(parent):
        if not _is_over(file):
            about: dict[str, Any] = json.load(file)
            found.append(Job(about["number"], folder, about["command"], about["ranks"], about["started"]))
    return sorted(found, key=lambda job: job.started)


def _sweep(parent: str) -> None:
    """Remove the folders of launchers that were killed."""
    for folder, file in _files(parent):
        if _is_over(file):
            shutil.rmtree(folder, ignore_errors=True)


def _files(parent: str) -> Iterator[tuple[str, TextIO]]:
    """Yield the folder of each job, and the file about it."""
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):
            folder = os.path.join(parent, name)
            with suppress(OSError), open(os.path.join(folder, _FILE), encoding="utf-8") as file:
                yield folder, file


def _is_over(file: TextIO) -> bool:
    """Whether the launcher is gone: it holds the lock no more."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
