"""Cost of hooks, keys, counters and timeouts per call: ``python bench/call_costs.py``.

Two ranks, processes of this host, await allreduces of 8 B and of 4 KiB one after the other. Each way of calling has
separate launches, so that it cannot affect another; the launches of all ways alternate. The figure of a launch is the
median of its rounds, on rank 0. The table has the median, the minimum and the maximum of the launches, and the median
of the ratios to the plain call of the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import numpy as np
from machine import machine

from aiocoll import GroupOptions, ProcessGroup
from aiocoll.completion import Completion
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.parts import parts_of
from aiocoll.group.prepared_call import PreparedCall
from aiocoll.native import IMPLEMENTATION
from aiocoll.testing import run_processes
from aiocoll.work import Work

#: Number of float32 elements, by the size of the array.
SIZES = {"8 B": 2, "4 KiB": 1024}
#: Number of calls per round, and of warm-up calls before the first round.
CALLS = 1000
PLAIN, HOOK, INTERCEPTOR, PURE = (
    "plain",
    "one hook",
    "an interceptor that starts each call as it is",
    "`AIOCOLL_NATIVE=0`",
)
#: Measured ways of calling that need special group options.
OPTIONS = {"`stats=False`": GroupOptions(stats=False), '`debug="detail"`': GroupOptions(debug="detail")}


class Hook:
    def on_end(self, info: Any) -> None:
        pass


class Through:
    """An interceptor that starts each call unchanged."""

    moves_nothing = records = False

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def take(self, call: PreparedCall) -> Work[Any]:
        d = self._dispatcher
        identity, seq = d.numbered(call.key)
        completion = Completion(d.endpoint, call.op, seq, call.key, d)
        call.expect(completion)
        work: Work[Any] = Work(completion)
        d.enter(call.operation(d.comm, identity, completion))
        return work


async def block(pg: ProcessGroup, tensor: np.ndarray) -> None:
    async with pg.coalescing():
        pg.allreduce(tensor)


#: Measured ways of calling that need special arguments or a block, as functions that make the call.
CALL: dict[str, Callable[[ProcessGroup, np.ndarray], Awaitable[Any]]] = {
    "`key=`": lambda pg, tensor: pg.allreduce(tensor, key="key"),
    "`timeout=50.0`": lambda pg, tensor: pg.allreduce(tensor, timeout=50.0),
    "`timeout=0.4`": lambda pg, tensor: pg.allreduce(tensor, timeout=0.4),
    "a block of one call": block,
}
WAYS = (PLAIN, *OPTIONS, *CALL, HOOK, INTERCEPTOR, PURE)


def plain(pg: ProcessGroup, tensor: np.ndarray) -> Awaitable[Any]:
    return pg.allreduce(tensor)


async def job(pg: ProcessGroup, way: str, rounds: int) -> tuple[str, dict[str, float]]:
    """Return the implementation ("pure Python" or the accelerator), and the microseconds of a call by size."""
    call, dispatcher = CALL.get(way, plain), parts_of(pg).dispatcher
    if way == HOOK:
        pg.add_hook(Hook())
    elif way == INTERCEPTOR:
        dispatcher.intercept(Through(dispatcher))
    found: dict[str, float] = {}
    for size, count in SIZES.items():
        tensor, times = np.zeros(count, np.float32), []
        for turn in range(rounds + 1):
            began = time.perf_counter()
            for _ in range(CALLS):
                await call(pg, tensor)
            if turn:
                times.append((time.perf_counter() - began) / CALLS * 1e6)
        found[size] = median(times)
    return IMPLEMENTATION, found


def launch(way: str, rounds: int) -> dict[str, float]:
    """Run one launch of the benchmark; return the microseconds of a call by array size."""
    if way == PURE:
        os.environ["AIOCOLL_NATIVE"] = "0"
    try:
        options = OPTIONS.get(way, GroupOptions())
        ranks = asyncio.run(run_processes(2, job, way, rounds, options=options, timeout=300.0, loop="uvloop"))
    finally:
        if way == PURE:
            del os.environ["AIOCOLL_NATIVE"]
    implementation, found = ranks[0]
    if implementation != ("pure Python" if way == PURE else IMPLEMENTATION):
        raise RuntimeError(f"{way}: ran with the wrong implementation: {implementation}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of hooks, keys, counters and timeouts per call.")
    parser.add_argument("--launches", type=int, default=15, help="launches of each way (default: 15)")
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds of {CALLS} calls per launch (default: 10)")
    args = parser.parse_args()
    title = machine()
    turns = [{way: launch(way, args.rounds) for way in WAYS[:: 1 if turn % 2 else -1]} for turn in range(args.launches)]
    print("# The cost of hooks, keys, counters and timeouts per call\n", title, sep="\n")
    print(f"\n{IMPLEMENTATION.capitalize()}.\n\n| | | µs of a call | from | to | ratio |\n|---|---|--:|--:|--:|--:|")
    for size in SIZES:
        for way in WAYS:
            each = [turn[way][size] for turn in turns]
            ratio = median(turn[way][size] / turn[PLAIN][size] for turn in turns)
            print(f"| {size} | {way} | {median(each):.2f} | {min(each):.2f} | {max(each):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
