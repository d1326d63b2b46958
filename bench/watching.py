"""What watching costs a job: ``python bench/watching.py``.

Eight ranks, processes of this host, call allreduces of 8 B and of 1 MiB without a pause. Nobody watches, or
``aiocoll top --json``, or ``aiocoll top --web`` with somebody who asks once a second, as its page does; these take
turns within one job, and each turn begins when the viewer has had its first answer. A turn lasts long enough for
several answers. The ratio is that of a turn to the one beside it in which nobody watches, and the table has the median
of these. The viewer itself runs on the same cores.
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

NOBODY, TERMINAL, WEB = "nobody", "`aiocoll top --json`", "`aiocoll top --web`"
#: Elements of float32 of an array.
SIZES = {"8 B": 2, "1 MiB": 1 << 18}


@contextlib.contextmanager
def viewer(way: str, folder: str) -> Iterator[None]:
    """Watch the job, from the first answer on."""
    if way == NOBODY:
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
            raise RuntimeError(f"{way} does not answer")
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
    """Return microseconds of a call on this rank, by size, way and turn."""
    found: dict[str, dict[str, list[float]]] = {}
    for size, count in SIZES.items():
        tensor = np.zeros(count, np.float32)
        calls = await _calls(pg, tensor, seconds)
        times = found[size] = {NOBODY: [], TERMINAL: [], WEB: []}
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
    """Return how many calls take so long, the same on all ranks."""
    for _ in range(20):
        await pg.allreduce(tensor)
    began = time.perf_counter()
    for _ in range(50):
        await pg.allreduce(tensor)
    return max(50, int(await pg.broadcast(50 * seconds / (time.perf_counter() - began), 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching costs a job.")
    parser.add_argument("-n", "--nproc", type=int, default=8, help="ranks (default: 8)")
    parser.add_argument("--turns", type=int, default=7, help="of each way and size (default: 7)")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a turn (default: 2.5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as above:
        folder = str(Path(above) / "top")
        options = GroupOptions(top_dir=folder)
        arguments = (folder, args.turns, args.seconds)
        ranks = asyncio.run(run_processes(args.nproc, job, *arguments, options=options, timeout=1000.0, loop="uvloop"))
    print(f"# What watching costs a job of {args.nproc} ranks\n", machine(), "", sep="\n")
    print(f"{IMPLEMENTATION.capitalize()}.", "\n\n| | who watches | µs of a call | ratio | from | to |")
    print("|---|---|--:|--:|--:|--:|")
    for size, times in ranks[0].items():
        for way, each in times.items():
            took = median(each)
            ratios = [mine / alone for mine, alone in zip(each, times[NOBODY], strict=True)]
            low, middle, high = min(ratios), median(ratios), max(ratios)
            print(f"| {size} | {way} | {took:.1f} | {middle:.3f} | {low:.3f} | {high:.3f} |")


if __name__ == "__main__":
    main()
