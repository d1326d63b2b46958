"""`aiocoll bench --tune`: from which size on ranks of this host better read large arrays in each other's memory.

Two processes send each other messages of several sizes, and reduce arrays of these sizes, both with single copy and
without, in launches that take turns. Of each size the quickest launch counts; single copy pays from the smallest size
from which on it is never slower.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from aiocoll.algorithms.machine import SingleCopy
from aiocoll.cli.terminal import Progress
from aiocoll.errors import BackendUnavailableError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.testing import run_processes
from aiocoll.transport.shared_memory import LEAST_BY_REFERENCE
from aiocoll.transport.shm.process_memory import can_read
from aiocoll.tuning import dumps

__all__ = ["SIZES", "measure_single_copy", "paying", "use"]

#: Bytes of an array: in steps of 4 times, up to what no cache holds.
SIZES = tuple(LEAST_BY_REFERENCE << 2 * step for step in range(5))
#: Bytes moved per size and launch, at least so many times.
_NBYTES, _TIMES = 64 << 20, 4
_HUNG = 60.0

#: Seconds by size: to exchange an array, and to reduce one.
_Seconds = dict[int, tuple[float, float]]


async def measure_single_copy(launches: int) -> SingleCopy | None:
    """Measure with pairs of processes; None where no process can read another one.

    Args:
        launches: with single copy, and as many without.
    """
    if can_read() is not None:
        return None
    found: dict[bool, list[_Seconds]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        always = _write(Path(folder), SingleCopy(0, 0))
        for number, single_copy in enumerate([True, False] * launches, 1):
            progress.show(f"launch {number} of {2 * launches}: single copy")
            try:
                options = GroupOptions(transport="shm", single_copy=single_copy, tuning=always)
            except BackendUnavailableError:
                return None
            ranks = await run_processes(2, use, options=options, timeout=_HUNG, loop="uvloop")
            found[single_copy].append({size: _slowest(ranks, size) for size in SIZES})
    with_, without = (_quickest(found[each]) for each in (True, False))
    moved, reduced = (paying({size: with_[size][what] / without[size][what] for size in SIZES}) for what in range(2))
    return SingleCopy(moved, reduced)


async def use(pg: ProcessGroup) -> _Seconds:
    """Exchange and reduce arrays of all sizes; return the lower quartiles."""
    found = {}
    peer = 1 - pg.rank()
    for size in SIZES:
        ours, theirs = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        exchanges, reductions = [], []
        for _ in range(max(_TIMES, _NBYTES // size // len(SIZES))):
            await pg.barrier()
            start = perf_counter()
            sent = pg.send(ours, peer)
            await pg.recv(theirs, peer)
            await sent
            middle = perf_counter()
            await pg.reduce(ours, 0)
            exchanges.append(middle - start)
            reductions.append(perf_counter() - middle)
        found[size] = _quartile(exchanges), _quartile(reductions)
    return found


def paying(ratios: Mapping[int, float]) -> float:
    """Return the smallest size from which on no ratio is above 1; inf if the largest has one."""
    least = inf
    for size in sorted(ratios, reverse=True):
        if ratios[size] > 1:
            break
        least = float(size)
    return least


def _write(folder: Path, single_copy: SingleCopy) -> str:
    """Write a tuning with these sizes; return its path."""
    path = folder / "tuning.json"
    path.write_text(dumps({}, "", single_copy))
    return str(path)


def _slowest(ranks: Sequence[Any], size: int) -> tuple[float, float]:
    return max(rank[size][0] for rank in ranks), max(rank[size][1] for rank in ranks)


def _quickest(launches: Sequence[_Seconds]) -> _Seconds:
    return {size: (min(each[size][0] for each in launches), min(each[size][1] for each in launches)) for size in SIZES}


def _quartile(times: list[float]) -> float:
    return sorted(times)[len(times) // 4]
