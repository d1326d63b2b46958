"""Cost of watching a job with `aiocoll top`: ``python bench/viewer_costs.py``.

Eight ranks, processes of this host, call allreduces of 8 B and of 1 MiB without a pause. The job runs unwatched, with
``aiocoll top --json``, or with ``aiocoll top --web`` and a client that sends a request once a second, as its page does.
These three alternate within one job. Each turn starts with the first answer to the viewer, and lasts for several
answers. The ratio compares a turn with the adjacent unwatched turn; the table has the median ratio. The viewer runs on
the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from machine import machine

from aiocoll import GroupOptions, ProcessGroup
from aiocoll.native import IMPLEMENTATION
from aiocoll.testing import run_processes

UNWATCHED, TERMINAL, WEB = "unwatched", "`aiocoll top --json`", "`aiocoll top --web`"
#: Number of float32 elements, by the size of the array.
SIZES = {"8 B": 2, "1 MiB": 1 << 18}


@contextlib.contextmanager
def viewer(way: str, folder: str) -> Iterator[None]:
    """Run a viewer of the job; begin the block when the viewer has printed or answered for the first time."""
    if way == UNWATCHED:
        yield
        return
    option = "--json" if way == TERMINAL else "--web"
    command = [sys.executable, "-m", "aiocoll", "top", option, folder]
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    over = threading.Event()
    first = threading.Event()
    reader = threading.Thread(target=_read if way == TERMINAL else _poll, args=(process, first, over))
    reader.start()
    try:
        if not first.wait(60):
            raise RuntimeError(f"{way}: the viewer showed nothing within 60 s")
        yield
    finally:
        over.set()
        process.kill()
        process.wait()
        reader.join()


def _read(process: subprocess.Popen[str], first: threading.Event, over: threading.Event) -> None:
    assert process.stdout is not None
    for _ in process.stdout:
        first.set()


def _poll(process: subprocess.Popen[str], first: threading.Event, over: threading.Event) -> None:
    assert process.stdout is not None
    address, _, token = process.stdout.readline().strip().partition("?token=")
    request = urllib.request.Request(f"{address}news", headers={"Authorization": f"Bearer {token}"})
    while not over.is_set():
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
            first.set()
        over.wait(1.0)


async def job(pg: ProcessGroup, folder: str, turns: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of a call on this rank, by array size, way of watching, and turn."""
    found: dict[str, dict[str, list[float]]] = {}
    for size, count in SIZES.items():
        tensor = np.zeros(count, np.float32)
        calls = await _calls(pg, tensor, seconds)
        times = found[size] = {UNWATCHED: [], TERMINAL: [], WEB: []}
        for turn in range(turns):
            for way in list(times)[:: 1 if turn % 2 else -1]:
                async with contextlib.AsyncExitStack() as stack:
                    if pg.rank() == 0:
                        watching = viewer(way, folder)
                        await asyncio.to_thread(watching.__enter__)
                        stack.callback(watching.__exit__, None, None, None)
                    await pg.barrier()
                    began = time.perf_counter()
                    for _ in range(calls):
                        await pg.allreduce(tensor)
                    times[way].append((time.perf_counter() - began) / calls * 1e6)
    return found


async def _calls(pg: ProcessGroup, tensor: np.ndarray, seconds: float) -> int:
    """Return the number of calls that take about `seconds` in total; rank 0 determines the number for all."""
    for _ in range(20):
        await pg.allreduce(tensor)
    began = time.perf_counter()
    for _ in range(50):
        await pg.allreduce(tensor)
    return max(50, int(await pg.broadcast(50 * seconds / (time.perf_counter() - began), 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of watching a job.")
    parser.add_argument("-n", "--nproc", type=int, default=8, help="ranks (default: 8)")
    parser.add_argument("--turns", type=int, default=7, help="turns of each way and size (default: 7)")
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds per turn (default: 2.5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as above:
        folder = str(Path(above) / "top")
        options = GroupOptions(top_dir=folder)
        arguments = (folder, args.turns, args.seconds)
        ranks = asyncio.run(run_processes(args.nproc, job, *arguments, options=options, timeout=1000.0, loop="uvloop"))
    print(f"# The cost of watching a job of {args.nproc} ranks\n", machine(), "", sep="\n")
    print(f"{IMPLEMENTATION.capitalize()}.", "\n\n| | viewer | µs of a call | ratio | from | to |")
    print("|---|---|--:|--:|--:|--:|")
    for size, times in ranks[0].items():
        for way, each in times.items():
            took = median(each)
            ratios = [mine / alone for mine, alone in zip(each, times[UNWATCHED], strict=True)]
            low, middle, high = min(ratios), median(ratios), max(ratios)
            print(f"| {size} | {way} | {took:.1f} | {middle:.3f} | {low:.3f} | {high:.3f} |")


if __name__ == "__main__":
    main()
