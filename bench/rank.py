"""A rank of one launch: python bench/rank.py FOLDER [RANK]. Started by launch.py, or through mpiexec.

FOLDER/config.json contains the cases to measure. Rank 0 writes a line of JSON to FOLDER/results after each case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import IO, Any

import libraries
from inflight import Case, Workloads

from aiocoll.cli.measure import Effort, measure


async def measure_all(cases: list[Case], effort: Effort, results: IO[str], library: libraries.Library) -> None:
    for index, case in enumerate(cases):
        loads = Workloads(case, library.rank, library.world_size)
        timing = await measure(loads, library.times(loads.all), library.combine, effort)
        if library.rank == 0:
            line = {"index": index, "nanoseconds": timing.nanoseconds, "cpu": timing.cpu, "wrong": timing.wrong}
            results.write(json.dumps(line) + "\n")
            results.flush()


def main() -> None:
    os.chdir(sys.argv[1])
    config = json.loads(Path("config.json").read_text())
    # End by an alarm, because the parent may have ended, or cannot end a rank that mpiexec has started.
    signal.alarm(config["limit"])
    Path(f"{os.getpid()}.pid").touch()
    cases, effort = [Case(*case) for case in config["cases"]], Effort(*config["effort"])
    with open("results", "a") as results:
        measure_with(config, partial(measure_all, cases, effort, results))


def measure_with(config: dict[str, Any], run: libraries.Run) -> None:
    match config["library"]:
        case "mpi":
            libraries.mpi(config, run)
        case "gloo":
            libraries.gloo(config, int(sys.argv[2]), run)
        case "aiocoll":
            libraries.aiocoll(config, int(sys.argv[2]), run)


if __name__ == "__main__":
    main()
