"""Measurement for `aiocoll bench --tune`: the array sizes from which single copy (reading a peer's memory) is faster.

Two processes make three calls with messages of several sizes: a gather, an exchange in both directions, and an
allreduce. Launches with single copy and without alternate. The fastest launch counts for each size. Single copy pays
from the smallest size above which it is never slower. The processes run without the accelerator, which uses chunk
queues between two ranks at every size.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from aiocoll.work import Work

__all__ = ["SIZES", "disabled_accelerator", "measure_single_copy", "paying", "use"]

#: Array sizes in bytes: each is 4 times the size before, and the last exceeds all caches.
SIZES = tuple(LEAST_BY_REFERENCE << 2 * step for step in range(5))
#: Bytes that each kind of call transfers per launch, over all sizes; and minimum number of calls per size.
_NBYTES, _TIMES = 64 << 20, 4
_HUNG = 60.0

#: By array size, the seconds of each call in the order of the fields of `SingleCopy`.
_Seconds = dict[int, list[float]]


async def measure_single_copy(launches: int) -> SingleCopy | None:
    """Measure single copy between two processes; return None if processes cannot read each other's memory.

    Args:
        launches: number of launches with single copy, and of launches without.
    """
    if can_read() is not None:
        return None
    found: dict[bool, list[_Seconds]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress, disabled_accelerator():
        always = _write(Path(folder), SingleCopy(0, 0, 0))
        for number, single_copy in enumerate([True, False] * launches, 1):
            progress.show(f"launch {number} of {2 * launches}: single copy")
            try:
                options = GroupOptions(transport="shm", single_copy=single_copy, tuning=always)
            except BackendUnavailableError:
                return None
            ranks = await run_processes(2, use, options=options, timeout=_HUNG, loop="uvloop")
            found[single_copy].append({size: _slowest(ranks, size) for size in SIZES})
    with_, without = (_quickest(found[each]) for each in (True, False))
    calls = range(len(SingleCopy._fields))
    return SingleCopy(*(paying({size: with_[size][call] / without[size][call] for size in SIZES}) for call in calls))


@contextmanager
def disabled_accelerator() -> Iterator[None]:
    """Let processes that are started in the block run aiocoll in pure Python."""
    before = os.environ.get("AIOCOLL_NATIVE")
    os.environ["AIOCOLL_NATIVE"] = "0"
    try:
        yield
    finally:
        del os.environ["AIOCOLL_NATIVE"]
        if before is not None:
            os.environ["AIOCOLL_NATIVE"] = before


async def use(pg: ProcessGroup) -> _Seconds:
    """Time gather, alltoall and allreduce with messages of all sizes; return the lower quartiles by size."""
    found = {}
    for size in SIZES:
        ours, both = np.zeros(size // 4, np.float32), np.zeros(size // 2, np.float32)
        blocks = [np.zeros(size // 4, np.float32) for _ in range(2)] if pg.rank() == 0 else None
        calls: list[Callable[[], Work[Any]]] = [
            partial(pg.gather, blocks, ours, 0),
            partial(pg.alltoall_base, np.zeros(size // 2, np.float32), both),
            partial(pg.allreduce, both),
        ]
        found[size] = [await _lower_quartile(pg, call, max(_TIMES, _NBYTES // size // len(SIZES))) for call in calls]
    return found


async def _lower_quartile(pg: ProcessGroup, call: Callable[[], Work[Any]], times: int) -> float:
    seconds = []
    for _ in range(times):
        await pg.barrier()
        start = perf_counter()
        await call()
        seconds.append(perf_counter() - start)
    return sorted(seconds)[times // 4]


def paying(ratios: Mapping[int, float]) -> float:
    """Return the smallest size from which single copy is never slower (no ratio above 1); inf if there is none."""
    least = inf
    for size in sorted(ratios, reverse=True):
        if ratios[size] > 1:
            break
        least = float(size)
    return least


def _write(folder: Path, single_copy: SingleCopy) -> str:
    """Write a tuning file with these size limits; return its path."""
    path = folder / "tuning.json"
    path.write_text(dumps({}, "", single_copy))
    return str(path)


def _slowest(ranks: Sequence[_Seconds], size: int) -> list[float]:
    return list(map(max, *(rank[size] for rank in ranks)))


def _quickest(launches: Sequence[_Seconds]) -> _Seconds:
    return {size: [min(found) for found in zip(*(each[size] for each in launches), strict=True)] for size in SIZES}
