"""Detection of stuck ranks on this host: stopped processes and blocked event loops."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from aiocoll.errors import AiocollError
from aiocoll.process import STOPPED, identify, state
from aiocoll.top.viewer import State, Viewer

__all__ = ["find_stuck"]

#: Seconds to wait for the answers of processes. With a free core, a process answers within about 0.5 ms.
MAX_WAIT = 0.5


def find_stuck(processes: Mapping[int, int], folder: str | None) -> dict[int, str]:
    """Return the stuck ranks of this host, each with the reason.

    Args:
        processes: process ids, by rank.
        folder: the folder in which the processes answer `aiocoll top`; None if they do not.
    """
    found = {
        rank: f"process {number} stopped, by SIGSTOP or a debugger"
        for rank, number in processes.items()
        if state(identify(number)) == STOPPED
    }
    others = {rank: number for rank, number in processes.items() if rank not in found}
    if folder and others:
        with suppress(AiocollError, OSError):
            found.update(_request_states(others, folder))
    return found


def _request_states(processes: Mapping[int, int], folder: str) -> Iterator[tuple[int, str]]:
    viewer = Viewer(folder, time.monotonic)
    try:
        viewer.request_answers(MAX_WAIT)
        for rank, number in processes.items():
            process = viewer.processes.get(number)
            if process is None:
                continue
            if process.state == State.SILENT:
                yield rank, f"process {number} does not answer: one call holds the GIL, or the host has no CPU for it"
            elif (blocked := next(filter(None, (each.get("blocked") for each in process.groups)), None)) is not None:
                yield rank, f"event loop blocked for {blocked[0]:.1f} s, at {blocked[1]}"
    finally:
        viewer.close()
