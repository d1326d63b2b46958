"""The results of `aiocoll bench` for programs: a CSV file, or one JSON object.

The object has these fields, and those of a later version will have them, too:

    format, version     "aiocoll bench", and 1: another number would mean that a field is gone or means something else
    aiocoll, compiled   the version of the package, and whether its hot modules are compiled
    python, numpy       their versions
    system, cores       the operating system with its release and the kind of processor; cores that this process may use
    load                load average of the minute before the measurement: other processes, if nothing else was run
    collective, op      what was measured; op is null where nothing is reduced
    dtype, ranks        of the elements; how many processes
    transport           what --transport asked for
    results             one object per size, like a line of the table:

        bytes, count            of a rank's array, or of all blocks together
        iterations              that were timed
        p50_us, p95_us, p99_us  time of the slowest rank, in microseconds
        algbw_gbs, busbw_gbs    at the median, in 1e9 bytes per second, as nccl-tests defines them
        cpu_us                  CPU time of all ranks together, per iteration
        wrong                   elements that were not what they should be
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

import aiocoll
from aiocoll.algorithms.spec import spec_of
from aiocoll.cli.measure import Figures, Timing
from aiocoll.cli.workload import Case
from aiocoll.work import COMPILED

__all__ = ["as_json", "try_csv", "write_csv"]

FORMAT, VERSION = "aiocoll bench", 1


def as_json(args: argparse.Namespace, load: float, cases: Sequence[Case], timings: Sequence[Timing]) -> str:
    """Return the object that `aiocoll bench --json` prints."""
    told = {
        "format": FORMAT,
        "version": VERSION,
        "aiocoll": aiocoll.__version__,
        "compiled": COMPILED,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": round(load, 2),
        "collective": args.collective,
        "op": args.op if spec_of(args.collective).reduces else None,
        "dtype": args.dtype,
        "ranks": args.nproc,
        "transport": args.transport,
        "results": [_result(case, args.nproc, timing) for case, timing in zip(cases, timings, strict=True)],
    }
    return json.dumps(told, indent=1)


def try_csv(path: str) -> None:
    """Find out whether `path` can be written, before something is measured for it.

    Raises:
        ValueError: it cannot.
    """
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ValueError(f"--csv {path}: {error.strerror}") from None


def write_csv(path: str, args: argparse.Namespace, cases: Sequence[Case], timings: Sequence[Timing]) -> None:
    """Write a line for each case, below the names of the columns."""
    op = args.op if spec_of(args.collective).reduces else ""
    what = {"collective": args.collective, "op": op, "dtype": args.dtype}
    how = {"ranks": args.nproc, "transport": args.transport}
    rows = [what | how | _result(case, args.nproc, timing) for case, timing in zip(cases, timings, strict=True)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _result(case: Case, world_size: int, timing: Timing) -> dict[str, Any]:
    figures = Figures.of(case, world_size, timing.nanoseconds)
    return {
        "bytes": case.size(world_size),
        "count": case.count(world_size),
        "iterations": len(timing.nanoseconds),
        **{f"{name}_us": round(getattr(figures, name) * 1e6, 3) for name in ("p50", "p95", "p99")},
        **{f"{name}_gbs": round(getattr(figures, name) / 1e9, 6) for name in ("algbw", "busbw")},
        "cpu_us": round(timing.cpu * 1e6, 3),
        "wrong": timing.wrong,
    }
