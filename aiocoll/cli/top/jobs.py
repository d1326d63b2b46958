"""The jobs of this user on this host that `aiocoll run` has started: a folder each, by the number of the launcher."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiocoll.process import GONE, ProcessId, state, this_process
from aiocoll.rendezvous.private_folder import private_folder

__all__ = ["Job", "job_folder", "jobs"]

_FOLDER, _FILE = "aiocoll-top", "job.json"


@dataclass(frozen=True, slots=True)
class Job:
    """A running job.

    Attributes:
        number: of its launcher.
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
    folder = os.path.join(parent, str(os.getpid()))
    shutil.rmtree(folder, ignore_errors=True)  # of a launcher that had this number in another namespace
    os.mkdir(folder, 0o700)
    try:
        about = {"process": this_process(), "command": " ".join(command), "ranks": ranks, "started": time.time()}
        beginning = os.path.join(folder, f".{_FILE}")
        with open(beginning, "w", encoding="utf-8") as file:
            json.dump(about, file)
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
    for name, about in _read(parent):
        if not _is_over(about):
            folder = os.path.join(parent, name)
            found.append(Job(about["process"][1], folder, about["command"], about["ranks"], about["started"]))
    return sorted(found, key=lambda job: job.started)


def _sweep(parent: str) -> None:
    """Remove the folders of launchers that were killed."""
    for name, about in _read(parent):
        if _is_over(about):
            shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def _read(parent: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):
            with suppress(OSError, ValueError), open(os.path.join(parent, name, _FILE), encoding="utf-8") as file:
                yield name, json.load(file)


def _is_over(about: Mapping[str, Any]) -> bool:
    """Whether the launcher is gone; one in another namespace cannot be seen from here, and may live."""
    launcher = ProcessId._make(about["process"])
    return launcher.namespace == this_process().namespace != 0 and state(launcher) == GONE
