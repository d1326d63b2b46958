"""Time until all ranks raise after a rank is lost, compared with Gloo: python bench/faults.py [--runs 20] [-n 4].

The ranks reduce a small and a large float32 array forever: with aiocoll over unix sockets and TCP, and with torch's
Gloo, by default and with a timeout of 10 s. One rank is killed (SIGKILL) or stopped (SIGSTOP), a different one in each
run. The time of a run is that of the last survivor to raise. Processes that have raised stay alive, as those of a
service would, so that no process learns of the fault from the end of another survivor.

Without torch only aiocoll is measured. If a survivor has not raised after `--patience` seconds, the run has failed, and
no further run of that kind follows.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from markdown import ranks_of, table

HERE = Path(__file__).parent
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
#: Measured systems by name, with their configuration for `faults_rank.py`.
PEERS: dict[str, dict[str, Any]] = {
    "aiocoll unix": {"library": "aiocoll", "transport": "unix"},
    "aiocoll tcp": {"library": "aiocoll", "transport": "tcp"},
    "gloo": {"library": "gloo", "timeout": None},
    "gloo, timeout 10 s": {"library": "gloo", "timeout": 10},
}
#: Bytes of the reduced array, alternating from run to run.
SIZES = (64 << 10, 16 << 20)
#: Timeout in seconds for the ranks to meet, and for the survivors to shrink the group.
LIMIT = 60
#: The fault happens at a random moment within this many seconds, in which ranks make many calls.
SPREAD = 0.05


@dataclass
class FaultRun:
    """The result of one run, in which one rank was killed or stopped.

    Attributes:
        seconds: seconds until the last survivor raised; None if one had not raised within the patience.
        named: share of the survivors whose error names the victim.
        errors: classes of the raised errors.
        shrunk: seconds from there to the first result of the group without the victim; None if not measured.
    """

    seconds: float | None
    named: float
    errors: tuple[str, ...]
    shrunk: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description="Time until all survivors of a fault have raised.")
    parser.add_argument("-n", type=int, default=4, metavar="RANKS", help="world size (default: 4)")
    parser.add_argument("--runs", type=int, default=20, help="runs of each fault and peer (default: 20)")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for survivors (default: 60)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    args = parser.parse_args()
    if args.n < 3:
        parser.error("-n: give at least 3 ranks, so that a group survives")
    print("# Faults: seconds until every survivor has raised\n", machine(), "", sep="\n", flush=True)
    for fault in args.faults:
        found = asyncio.run(measure(fault, args.n, args.runs, args.patience))
        print(fault_table(fault, args.n, args.patience, found), "", sep="\n", flush=True)


async def measure(fault: str, world_size: int, runs: int, patience: float) -> dict[str, list[FaultRun]]:
    """Return the runs of each system. The systems alternate, so that other work on the machine affects all equally."""
    torch = importlib.util.find_spec("torch") is not None
    found: dict[str, list[FaultRun]] = {name: [] for name, peer in PEERS.items() if torch or peer["library"] != "gloo"}
    for number in range(runs):
        for name, done in found.items():
            if done and done[-1].seconds is None:
                continue
            config = PEERS[name] | {"nbytes": SIZES[number % len(SIZES)], "shrink": can_shrink()}
            done.append(await run(config, FAULTS[fault], world_size, number % world_size, patience))
            print(f"{fault}, run {number + 1}, {name}: {done[-1]}", file=sys.stderr, flush=True)
    return found


def can_shrink() -> bool:
    from aiocoll import ProcessGroup

    return hasattr(ProcessGroup, "shrink")


async def run(config: dict[str, Any], fault: signal.Signals, world_size: int, victim: int, patience: float) -> FaultRun:
    """Start the ranks, apply the fault to `victim`, and collect the reports of the other ranks."""
    config = config | {"world_size": world_size, "job_key": secrets.token_hex(16)}
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                command = [sys.executable, str(HERE / "faults_rank.py"), json.dumps(config | {"rank": rank})]
                pipe = asyncio.subprocess.PIPE
                # The ranks meet through a file in their working directory. Discard error output of failing libraries.
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, cwd=folder
                )
                ranks.append(process)
            await read_lines(ranks, LIMIT)
            survivors = [process for rank, process in enumerate(ranks) if rank != victim]
            await asyncio.sleep(random.random() * SPREAD)
            began = time.monotonic()
            # Use os.kill, because asyncio's send_signal may reap the process, so that its watcher misses the end.
            os.kill(ranks[victim].pid, fault)
            try:
                raised = await read_lines(survivors, patience)
            except TimeoutError:
                return FaultRun(None, 0, (), None)
            shrunk = None
            if config["library"] == "aiocoll" and config["shrink"]:
                shrunk = max(report["shrunk"] for report in await read_lines(survivors, LIMIT))
            return FaultRun(
                max(report["at"] for report in raised) - began,
                sum(bool(re.search(rf"\brank {victim}\b", report["text"])) for report in raised) / len(raised),
                tuple(sorted({report["error"] for report in raised})),
                shrunk,
            )
        finally:
            for process in ranks:
                if process.returncode is None:
                    with suppress(ProcessLookupError):  # the process has ended, but asyncio has not noticed yet
                        os.kill(process.pid, signal.SIGKILL)
            await asyncio.gather(*(process.communicate() for process in ranks))


async def read_lines(ranks: list[asyncio.subprocess.Process], limit: float) -> list[dict[str, Any]]:
    """Read the next line of each process, and return the lines parsed from JSON."""
    async with asyncio.timeout(limit):
        lines = await asyncio.gather(*(process.stdout.readline() for process in ranks))  # type: ignore[union-attr]
    if not all(lines):
        sys.exit("a rank ended too early; run bench/faults_rank.py by hand to see its error")
    return [json.loads(line) for line in lines]


def fault_table(fault: str, world_size: int, patience: float, found: Mapping[str, Sequence[FaultRun]]) -> str:
    """Return the table of a fault, with one row per system."""
    rows = []
    for peer, runs in found.items():
        taken = [patience if run.seconds is None else run.seconds for run in runs]
        over = ["> " if any(run.seconds is None for run in runs) else ""] * 3
        numbers = [f"{sign}{value:.3f}" for sign, value in zip(over, np.percentile(taken, (50, 99, 100)), strict=True)]
        errors = ", ".join(sorted({error for run in runs for error in run.errors})) or "none"
        named = f"{sum(run.named for run in runs) / len(runs):.0%}"
        shrunk = [run.shrunk for run in runs if run.shrunk is not None]
        rows.append((peer, len(runs), *numbers, errors, named, f"{np.percentile(shrunk, 99):.3f}" if shrunk else "–"))
    head = ("system", "runs", "p50 s", "p99 s", "max s", "error", "names the rank", "shrink p99 s")
    return f"## {fault} of one of {ranks_of(world_size)}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
