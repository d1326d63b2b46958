"""Cost of operation counters (the option `stats`) per call: ``python bench/counter_costs.py``.

Two ranks in one thread await allreduces of one number. Short rounds without counters and with counters alternate. In
each call one of the ranks waits for the other. The figure is the CPU time of the thread, half of it per rank. The
minimum over all rounds is free of disturbance by other work on the machine.
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
    """Return, for each way of calling, the nanoseconds per call in each round."""
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
    parser = argparse.ArgumentParser(description="The cost of counters per call.")
    parser.add_argument("--rounds", type=int, default=1500, help="rounds of each way (default: 1500)")
    found, _ = asyncio.run(run_ranks(2, rounds, parser.parse_args().rounds, timeout=None))
    print("# The cost of counters per call\n", machine(), "", f"{IMPLEMENTATION.capitalize()}.", "", sep="\n")
    print("| ns of CPU | least | more | median | more |\n|---|--:|--:|--:|--:|")
    least, middle = min(found[OFF]), median(found[OFF])
    for way, each in found.items():
        print(
            f"| {way} | {min(each):.0f} | {min(each) - least:.0f} | {median(each):.0f} | {median(each) - middle:.0f} |"
        )


if __name__ == "__main__":
    main()
