"""Import time, start time and memory of an idle group: python bench/footprint.py [-n 2 4 8 16 32 64] [--idle 20].

- Import: the time of `import aiocoll` in addition to NumPy's, and of the first use of `aiocoll.new_group`, in new
  interpreters with compiled files.
- Start: all ranks, imported and ready, enter `new_group()` at the same time. The figure is the seconds from the last
  entry to the last group. The store is in the process that starts the ranks, as under `aiocoll run`.
- CPU: the CPU time of each rank for that.
- Memory: private bytes that one rank gains by its group, and by a link with every other rank. The difference divided by
  the number of links is the cost of an idle link. It excludes kernel buffers. With few links it includes the costs of
  the first link that occur only once.
- Idle: share of a core that one rank uses while it waits without work.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine

from aiocoll.machine_load import LoadMeter
from aiocoll.store.server import StoreServer

HERE = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
#: Promised limits: import in ms, start of 64 ranks in s, bytes per link, CPU share of a core while idle.
IMPORT, START, LINK, IDLE = 60, 2.0, 64 * KIB, 0.001
#: Number of timed imports, each in a new interpreter.
IMPORTS = 10
#: Seconds until a rank counts as hung.
HUNG = 60
TIMED = """
import numpy, time
began, used = time.perf_counter(), time.thread_time()
import aiocoll
imported = time.perf_counter()
aiocoll.new_group
print(imported - began, time.perf_counter() - imported, time.thread_time() - used)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of a group before it does any work.")
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], metavar="RANKS", help="world sizes")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds without work (default: 20)")
    parser.add_argument("--runs", type=int, default=3, help="starts of each world size (default: 3)")
    parser.add_argument("--transport", default="auto", choices=("auto", "unix", "tcp"), help="default: auto")
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: give at least 2 ranks")
    meter = LoadMeter()
    print("# Footprint: import, start, memory, idle CPU\n", machine(), "", sep="\n", flush=True)
    took, first, cpu = imports()
    print(
        f"`import aiocoll` on top of NumPy, {IMPORTS} times: median {median(took):.1f} ms ({min(took):.1f} to "
        f"{max(took):.1f}). First use of `aiocoll.new_group`: {median(first):.1f} ms ({min(first):.1f} to "
        f"{max(first):.1f}). CPU time of both: {median(cpu):.1f} ms\n",
        flush=True,
    )
    print("| ranks | start s | range | CPU ms per rank | MiB per rank | linked | KiB per link | idle % of a core |")
    print("|--:|--:|---|--:|--:|--:|--:|--:|")
    for world_size in args.n:
        print(row(world_size, [start(world_size, args.transport, args.idle) for _ in range(args.runs)]), flush=True)
    print(f"\nTargets: import ≤ {IMPORT} ms, 64 ranks ≤ {START:g} s, link ≤ {LINK // KIB} KiB, idle ≤ {IDLE:.1%}.")
    print(f"Load meanwhile: {meter.lap()}")


def imports() -> tuple[list[float], ...]:
    """Return milliseconds of each import, of the first use of `aiocoll.new_group`, and of CPU time for both.

    The first interpreter, which compiles the files, is not counted.
    """
    with tempfile.TemporaryDirectory() as compiled:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", TIMED]
        found = [subprocess.run(command, env=env, capture_output=True, check=True) for _ in range(IMPORTS + 1)]
    rows = [[float(text) * 1e3 for text in each.stdout.split()] for each in found[1:]]
    return tuple(map(list, zip(*rows, strict=True)))


def start(world_size: int, transport: str, idle: float) -> list[list[dict[str, Any]]]:
    """Start a group, let it idle, and return for each step the reports of all ranks."""
    with ranks(world_size, {"transport": transport, "idle": idle}) as processes:
        steps = []
        for _ in range(4):
            steps.append([read_line(process) for process in processes])
            for process in processes:
                process.stdin.write("on\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        for rank, process in enumerate(processes):
            if process.wait(HUNG):
                sys.exit(f"rank {rank} failed; its message is above")
    return steps


@contextmanager
def ranks(world_size: int, config: dict[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a store, and the processes of the ranks with the environment that `aiocoll run` sets."""
    job, key = secrets.token_hex(8), secrets.token_hex(16)
    server = StoreServer(key=key.encode(), job=job, world_size=world_size)
    host, port = server.start()
    with ExitStack() as stack:
        stack.callback(server.close)
        found = []
        for rank in range(world_size):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "AIOCOLL_JOB_ID": job,
                "AIOCOLL_STORE": "launcher",
            }
            command = [sys.executable, str(HERE / "footprint_rank.py"), json.dumps(config | {"job_key": key})]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True))
            stack.callback(process.kill)
            found.append(process)
        yield found


def read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline()  # type: ignore[union-attr]
    if not line:
        sys.exit("a rank ended too early; its message is above")
    found: dict[str, Any] = json.loads(line)
    return found


def row(world_size: int, runs: Sequence[list[list[dict[str, Any]]]]) -> str:
    took, cpu, alone, linked, link, idle = [], [], [], [], [], []
    for imported, formed, met, rested in runs:
        took.append(max(each["formed"] for each in formed) - max(each["entered"] for each in formed))
        cpu.append(median(each["cpu"] for each in formed))
        alone.append(
            median(each["resident"] - before["resident"] for each, before in zip(formed, imported, strict=True))
        )
        linked.append(median(each["resident"] - before["resident"] for each, before in zip(met, imported, strict=True)))
        link.append((linked[-1] - alone[-1]) / (world_size - 1))
        idle.append(median(each["share"] for each in rested))
    cells = (
        world_size,
        f"{median(took):.3f}",
        f"{min(took):.3f} to {max(took):.3f}",
        f"{median(cpu) * 1e3:.0f}",
        f"{median(alone) / MIB:.2f}",
        f"{median(linked) / MIB:.2f}",
        f"{median(link) / KIB:.0f}",
        f"{median(idle):.3%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
