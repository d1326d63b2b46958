"""`aiocoll bench --tune`: measurement of this machine, for the choice of algorithms.

Two processes of this host exchange messages over every available transport. The round trip of a short message takes
twice alpha. Long messages in both directions at once, as in most schedules, give beta, the time per byte. The extra
time of a burst of short messages, compared with one message, gives the overhead per message. NumPy does the reducing.

The measurements alternate, so that other work of the machine affects all of them equally. They are repeated in several
launches, one transport after another. Other work can only add time. Therefore the lower quartile within a launch
counts, and the fastest launch.

The numbers of "tcp" are measured on the loopback interface. Ranks on several hosts use them too. If you know better
numbers for your network, edit the file.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from aiocoll.algorithms.machine import MEDIA, Machine, Medium, SingleCopy
from aiocoll.cli.terminal import Progress, print_error
from aiocoll.cli.tune_single_copy import measure_single_copy
from aiocoll.errors import AiocollError, BackendUnavailableError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.testing import run_processes
from aiocoll.tuning import default_path, dumps

__all__ = ["add_arguments", "exchange", "measure", "run"]

#: Bytes of a short message and of a long message. The latency is only a few percent of a long message's time.
SHORT, LONG = 8, 4 << 20
#: Number of short messages in a burst, not counting the first message.
BURST = 16
#: Bytes per reduction, as many as in a segment of a message; and bytes of the target array, which exceeds the private
#: caches of a core.
PIECE, ARRAY = 256 << 10, 8 << 20
#: Warm-up rounds per launch, launches per transport, seconds per launch, and seconds after which no further launch
#: starts. All launches together, with the start of their processes, take about ten seconds.
WARM_UP, LAUNCHES, SECONDS, ENOUGH = 5, 5, 0.5, 12.0
#: Seconds after which a launch counts as hung.
HUNG = 60.0
#: Maximum ratio between the latencies of two launches on a quiet machine.
CALM = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option `--tune` to a command."""
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measure latency and bandwidth of this machine instead, and write them to the file that every group reads "
        "(or to the file AIOCOLL_TUNING)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure this machine, print the results, and write them to the tuning file that every group reads.

    Returns:
        The exit code: 1 if the measurement or the file has failed, else 0.
    """
    path = Path(os.environ.get("AIOCOLL_TUNING") or default_path(os.environ))
    print("This takes about twenty seconds. Run nothing else during this time.", flush=True)
    try:
        launches = asyncio.run(measure(LAUNCHES, SECONDS))
        machines = {medium: min(found) for medium, found in launches.items()}
        print(_table(machines, launches))
        single_copy = asyncio.run(measure_single_copy(LAUNCHES))
        print(f"single copy: {_single_copy_text(single_copy)}")
        _write(path, dumps(machines, datetime.now(UTC).isoformat(timespec="seconds"), single_copy))
    except (AiocollError, OSError) as error:
        print_error("bench", error)
        return 1
    print(f"Written to {path}; groups use it from now on.")
    return 0


async def measure(launches: int, seconds: float) -> dict[Medium, list[Machine]]:
    """Measure latency and bandwidth of every medium that groups on this host can use.

    Args:
        launches: pairs of processes for each medium, at most.
        seconds: time of measurement per pair; starting the processes takes about as long.

    Returns:
        The results of all launches, by medium.
    """
    found: dict[Medium, list[Machine]] = {medium: [] for medium in MEDIA}
    end = perf_counter() + ENOUGH
    with Progress() as progress:
        for number in range(launches):
            if number and perf_counter() > end:
                break
            for medium, machines in found.items():
                progress.show(f"launch {number + 1} of {launches}: {medium}")
                try:
                    options = GroupOptions(transport=medium, tuning=None)
                except BackendUnavailableError:
                    continue
                ranks = await run_processes(2, exchange, seconds, options=options, timeout=HUNG, loop="uvloop")
                machines.append(ranks[0])
    return {medium: machines for medium, machines in found.items() if machines}


async def exchange(pg: ProcessGroup, seconds: float) -> Machine:
    """Measure messages between two ranks until rank 0 ends the measurement; return latency and bandwidth."""
    pair = _Pair(pg)
    for _ in range(WARM_UP):
        await pair.turn(more=True)
    pair.forget()
    end = perf_counter() + seconds
    while await pair.turn(more=perf_counter() < end):
        pass
    return pair.machine()


class _Pair:
    """The part of one rank in the measurements between two ranks, with the times measured so far."""

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = pg
        self._first = pg.rank() == 0
        self._peer = 1 - pg.rank()
        self._short = np.zeros(SHORT, np.uint8)
        self._long = np.zeros((2, LONG), np.uint8)
        self._burst = [np.zeros(SHORT, np.uint8) for _ in range(1 + BURST)]
        self._piece = np.zeros(PIECE // 4, np.float32)
        self._array = np.zeros(ARRAY // 4, np.float32)
        self.forget()

    def forget(self) -> None:
        """Drop all times measured so far, such as the times of the warm-up."""
        self._shorts: list[float] = []
        self._longs: list[float] = []
        self._singles: list[float] = []
        self._bursts: list[float] = []
        self._reductions: list[float] = []

    async def turn(self, more: bool) -> bool:
        """Measure all times once; return whether rank 0 requests another round."""
        if self._first:
            self._short[0] = more
        self._shorts.append(await self._measure_round_trip() / 2)
        self._singles.append(await self._measure_burst(1))
        self._bursts.append(await self._measure_burst(1 + BURST))
        self._longs.append(await self._exchange_long_messages())
        start = perf_counter()
        for piece in self._array.reshape(-1, len(self._piece)):
            np.add(self._piece, piece, out=piece)
        self._reductions.append(perf_counter() - start)
        return bool(self._short[0])

    def machine(self) -> Machine:
        """Compute alpha, overhead, beta and gamma from the measured times."""
        alpha = _lower_quartile(self._shorts)
        # Limit the overhead, because noise can falsify the measured difference. The true overhead is more than 0, and
        # at most half of alpha, because alpha includes two overheads.
        overhead = min(
            max((_lower_quartile(self._bursts) - _lower_quartile(self._singles)) / BURST, alpha / 100), alpha / 2
        )
        beta = max(_lower_quartile(self._longs) - alpha, alpha) / LONG
        return Machine(alpha, overhead, beta, _lower_quartile(self._reductions) / ARRAY)

    async def _measure_round_trip(self) -> float:
        start = perf_counter()
        if self._first:
            await self._pg.send(self._short, self._peer)
            await self._pg.recv(self._short, self._peer)
        else:
            await self._pg.recv(self._short, self._peer)
            await self._pg.send(self._short, self._peer)
        return perf_counter() - start

    async def _exchange_long_messages(self) -> float:
        start = perf_counter()
        sent = self._pg.send(self._long[0], self._peer)
        await self._pg.recv(self._long[1], self._peer)
        await sent
        return perf_counter() - start

    async def _measure_burst(self, count: int) -> float:
        """Send `count` short messages at once, and wait for the acknowledgement."""
        start = perf_counter()
        if self._first:
            works = [self._pg.send(message, self._peer) for message in self._burst[:count]]
        else:
            works = [self._pg.recv(message, self._peer) for message in self._burst[:count]]
        for work in works:
            await work
        if self._first:
            await self._pg.recv(self._short, self._peer)
        else:
            await self._pg.send(self._short, self._peer)
        return perf_counter() - start


def _lower_quartile(times: list[float]) -> float:
    """Return the lower quartile of the times."""
    return sorted(times)[len(times) // 4]


def _table(machines: Mapping[Medium, Machine], launches: Mapping[Medium, Sequence[Machine]]) -> str:
    """Return the measured numbers as a text table, with a warning if the launches differ much."""
    lines = [f"{'':6}{'latency':>11}{'per message':>14}{'bandwidth':>13}{'reducing':>13}{'n_half':>10}"]
    for medium, (alpha, overhead, beta, gamma) in machines.items():
        lines.append(
            f"{medium:6}{alpha * 1e6:8.1f} µs{overhead * 1e6:11.1f} µs{1e-9 / beta:8.1f} GB/s{1e-9 / gamma:8.1f} GB/s"
            f"{alpha / beta / 1024:6.0f} KiB"
        )
    for medium, found in launches.items():
        low, high = min(found).alpha, max(found).alpha
        if high > CALM * low:
            lines.append(
                f"{medium}: latency was {low * 1e6:.1f} to {high * 1e6:.1f} µs: something else keeps this machine "
                "busy; measure again when it is quiet"
            )
    return "\n".join(lines)


def _single_copy_text(single_copy: SingleCopy | None) -> str:
    """Return a text with the array sizes from which single copy is faster."""
    if single_copy is None:
        return "processes of this host cannot read the memory of other processes"
    return ", ".join(
        f"{what} from {nbytes / 1024:.0f} KiB on" if math.isfinite(nbytes) else f"{what} never"
        for what, nbytes in single_copy._asdict().items()
    )


def _write(path: Path, text: str) -> None:
    """Write a file atomically, because a group may read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.urandom(8).hex()}")  # several hosts may share the folder
    try:
        fresh.write_text(text)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
