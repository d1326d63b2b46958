"""Soak tests of the cost of unauthenticated clients ("strangers"), which connect in every second part of a run."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from itertools import chain
from pathlib import Path

import pytest

from aiocoll.store import StoreServer

HERE = Path(__file__).parent
KEY = b"k" * 32
#: Duration in seconds of a run, and of each part of the run with or without unauthenticated clients.
SECONDS, PART = 60.0, 1.5
#: Limits of the cost: the ratio of median durations for "hold" and "repeat", and the delay in seconds for "flood".
MOST_COST, MOST_DELAY = 1.05, 2.0

pytestmark = pytest.mark.soak


async def start_program(name: str, *arguments: object) -> Process:
    path = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / f"{name}.py"), *map(str, arguments)]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=path)


def send_line(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


async def read_lines(rank: Process, strangers: Process, durations: list[tuple[float, float]]) -> None:
    assert rank.stdout is not None
    while line := (await rank.stdout.readline()).decode():
        if line.startswith("at "):
            send_line(strangers, line.strip())
        else:
            _, begin, seconds = line.split()
            durations.append((float(begin), float(seconds)))


async def switch_strangers(strangers: Process, changes: list[float]) -> None:
    """Switch the unauthenticated clients on and off in turn, and record the time of each change."""
    while True:
        for word in ("on", "off"):
            send_line(strangers, word)
            changes.append(time.monotonic())
            await asyncio.sleep(PART)


async def measured_times(what: str, conduct: str, transport: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return the durations of work in each part of the run with unauthenticated clients, and in each part without."""
    unix = transport in ("unix", "shm")
    server = StoreServer(f"unix:@aiocoll-soak-{os.urandom(8).hex()}" if unix else "127.0.0.1", key=KEY)
    host, port = server.start()
    strangers = await start_program("unauthenticated_clients", conduct)
    send_line(strangers, f"at 1 {(chr(0) + host[6:])!r}" if unix else f"at 2 {(host, port)!r}")
    ranks = [await start_program("attacked_rank", what, rank, host, port, transport, SECONDS) for rank in range(2)]
    durations: list[tuple[float, float]] = []
    changes: list[float] = []
    turns = asyncio.create_task(switch_strangers(strangers, changes))
    try:
        await asyncio.gather(read_lines(ranks[0], strangers, durations), read_lines(ranks[1], strangers, []))
        assert [await rank.wait() for rank in ranks] == [0, 0]
        assert strangers.returncode is None
    finally:
        turns.cancel()
        strangers.stdin.close()  # type: ignore[union-attr]
        await strangers.wait()
        await server.aclose()
        for thread in threading.enumerate():
            if thread.name.startswith("asyncio-waitpid"):  # the process that this thread waits for has ended
                thread.join()
    parts: list[list[float]] = [[] for _ in changes]
    for begin, seconds in durations:
        number = sum(change <= begin for change in changes) - 1
        # Skip measurements that overlap a change, except a rendezvous that the clients delayed until after they left.
        ends = begin + seconds <= changes[number] + PART or (what == "meet" and number % 2 == 0)
        if number >= 0 and begin > changes[number] + PART / 10 and ends:
            parts[number].append(seconds)
    return parts[::2], parts[1::2]


def medians(parts: list[list[float]]) -> list[float]:
    return [statistics.median(part) for part in parts if part]


@pytest.mark.parametrize("transport", ["tcp", "unix"])
@pytest.mark.parametrize("conduct", ["hold", "repeat"])
async def test_unauthenticated_clients_that_hold_or_repeat_connections_cost_little_time(
    conduct: str, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_them, without = map(medians, await measured_times("work", conduct, transport))
    # Compare adjacent parts of the run, since the load of the machine changes during the run.
    ratio = statistics.median(one / other for one, other in zip(with_them, without, strict=False))
    with capsys.disabled():
        print(
            f"\n{conduct}, {transport}: 50 allreduces of 64 KiB take {1e3 * statistics.median(with_them):.2f} ms with "
            f"strangers, {1e3 * statistics.median(without):.2f} ms without; ratio {ratio:.3f} (of {len(without)} pairs)"
        )
    assert ratio <= MOST_COST


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_unauthenticated_clients_that_flood_listeners_delay_a_rendezvous_little(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_them, without = map(list, map(chain.from_iterable, await measured_times("meet", "flood", transport)))
    with capsys.disabled():
        print(
            f"\nflood, {transport}: meeting takes {1e3 * statistics.median(with_them):.1f} ms (at most "
            f"{1e3 * max(with_them):.0f}) with strangers, {1e3 * statistics.median(without):.1f} ms (at most "
            f"{1e3 * max(without):.0f}) without; medians of {len(with_them)} and {len(without)} meetings"
        )
    assert max(with_them) - statistics.median(without) <= MOST_DELAY
