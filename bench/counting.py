"""What counting costs a call: ``python bench/counting.py``.

Two ranks in one thread await allreduces of one number, each of which one of them waits for, in many short rounds that
take turns: without counters, and with them. The CPU time of the thread counts, half of it for each rank; the least of
all rounds is what other work on the machine has not disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

import numpy as np
from machine import machine

from aiocoll import ProcessGroup
from aiocoll.group.parts import parts_of
from aiocoll.native import IMPLEMENTATION
from aiocoll.testing import run_ranks

CALLS = 150
OFF, ON = "not counted", "counted"


async def rounds(pg: ProcessGroup, number: int) -> dict[str, list[float]]:
    """Return nanoseconds of a call in each round, by way."""
    journal, tensor = parts_of(pg).comm.journal, np.ones(1)
    found: dict[str, list[float]] = {OFF: [], ON: []}
    for turn in range(number):
        for way in list(found)[:: 1 if turn % 2 else -1]:
            journal.counts = way == ON
            for _ in range(CALLS // 10):
                await pg.allreduce(tensor)
            began = time.thread_time_ns()
            for _ in range(CALLS):
                await pg.allreduce(tensor)
            found[way].append((time.thread_time_ns() - began) / CALLS / pg.size())
    journal.counts = True
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What counting costs a call.")
    parser.add_argument("--rounds", type=int, default=1500, help="of each way (default: 1500)")
    found, _ = asyncio.run(run_ranks(2, rounds, parser.parse_args().rounds, timeout=None))
    print("# What counting costs a call\n", machine(), "", f"{IMPLEMENTATION.capitalize()}.", "", sep="\n")
    print("| ns of CPU | least | more | median | more |\n|---|--:|--:|--:|--:|")
    least, middle = min(found[OFF]), median(found[OFF])
    for way, each in found.items():
        print(
            f"| {way} | {min(each):.0f} | {min(each) - least:.0f} | {median(each):.0f} | {median(each) - middle:.0f} |"
        )


if __name__ == "__main__":
    main()
