"""Machine-readable results of `aiocoll bench`: a CSV file, or one JSON object.

The object has the fields below. Later versions of aiocoll may add fields:

    format, version     "aiocoll bench", and 1; the number changes when a field is removed or changes its meaning
    aiocoll, compiled   the version of the package, and whether the accelerator in C runs
    python, numpy       their versions
    system, cores       the operating system, its release and the processor type; the cores that this process may use
    load                load average of the minute before the measurement; null where the system has none
    machine_load        load during the measurement; a value is null where the system does not report it:

        others, steal           cores used by other processes, and cores that the hypervisor gave to other machines
        pressure                share of the time in which a task waited for a core
        quota                   cores that the control group may use; null without a limit, too
        high                    true if the times cannot be trusted: others and steal took more than 0.3 cores

    collective, op      the measured collective and its reduction; op is null where nothing is reduced
    dtype, ranks        the element type; the number of processes
    transport           the value of --transport
    results             one object per size, like a line of the table:

        bytes, count            size of a rank's array, or of all blocks together, in bytes and in elements
        iterations              number of timed iterations
        p50_us, p95_us, p99_us  time of the slowest rank, in microseconds
        algbw_gbs, busbw_gbs    at the median, in 1e9 bytes per second, as nccl-tests defines them
        cpu_us                  CPU time of all ranks together, per iteration, in microseconds
        wrong                   number of elements with a wrong value
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

import aiocoll
from aiocoll.algorithms.spec import spec_of
from aiocoll.cli.measure import Figures, Timing
from aiocoll.cli.workload import Case
from aiocoll.machine_load import MachineLoad, usable_cores
from aiocoll.native import core

__all__ = ["as_json", "try_csv", "write_csv"]

FORMAT, VERSION = "aiocoll bench", 1


def as_json(
    args: argparse.Namespace,
    average: float | None,
    load: MachineLoad,
    cases: Sequence[Case],
    timings: Sequence[Timing],
) -> str:
    """Return the benchmark results as the JSON text that `aiocoll bench --json` prints.

    Args:
        args: the parsed command line.
        average: the load average before the measurement.
        load: the load of the machine during the measurement.
        cases: the measured cases.
        timings: the results, one per case.
    """
    report = {
        "format": FORMAT,
        "version": VERSION,
        "aiocoll": aiocoll.__version__,
        "compiled": core is not None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(usable_cores()),
        "load": _rounded(average),
        "machine_load": {
            "others": _rounded(load.others),
            "steal": _rounded(load.steal),
            "pressure": _rounded(load.pressure),
            "quota": None if load.quota == inf else _rounded(load.quota),
            "high": load.is_high,
        },
        "collective": args.collective,
        "op": args.op if spec_of(args.collective).reduces else None,
        "dtype": args.dtype,
        "ranks": args.nproc,
        "transport": args.transport,
        "results": [_result(case, args.nproc, timing) for case, timing in zip(cases, timings, strict=True)],
    }
    return json.dumps(report, indent=1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def try_csv(path: str) -> None:
    """Check before the measurement that the CSV file `path` can be written.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise ValueError(f"--csv {path}: cannot write the file: {error.strerror}") from None


def write_csv(path: str, args: argparse.Namespace, cases: Sequence[Case], timings: Sequence[Timing]) -> None:
    """Write the benchmark results to a CSV file: a line of column names, then one line per case."""
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
