"""Ranks that end or stop between posting data in shared memory and reading the data of peers, in overlapping groups.

The program reads scenarios, runs each on its own processes, and writes the errors of every rank in every group. The
victim acts just after it has started a call. It has posted its contribution, peers may have read it, and it has read
nothing. All calls use outboxes: small ones use slots, free or not, and some are too large for slots.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from aiocoll import AiocollError, GroupOptions, ProcessGroup, new_group
from aiocoll.work import Work
from tests.chaos.forked_ranks import Report, Reports, run_chosen, run_forked

from ..internals import comm_of

#: Events that happen to the victim; "long" stops the victim until the other ranks declare it lost.
WHAT = ("kill", "stop", "close", "long")
WORLD_SIZES = (3, 4)
#: Calls per group: more than a lane has large slots. The calls of all groups together exceed its small slots.
CALLS = 48
#: Numbers of float64 elements that fit the line of a slot, a small slot or a large slot, or exceed every slot.
COUNTS = (1, 3, 6, 100, 513, 2000, 9000)
#: Seconds after which a call counts as hung.
TIMEOUT = 30


def scenarios() -> list[dict[str, Any]]:
    """Return scenarios: every victim in groups of each size, with every event that can hit it, early and late."""
    every = itertools.product(WHAT, WORLD_SIZES, range(max(WORLD_SIZES)), (2, 11, 40))
    return [
        {"what": what, "world": world, "victim": victim, "call": call, "seed": number}
        for number, (what, world, victim, call) in enumerate(every)
        # Stop ranks for long in few scenarios only, because a stopped rank is declared lost after some seconds.
        if victim < world and (what != "long" or call == 11)
    ]


def members(world: int, victim: int) -> dict[str, list[int]]:
    """Return the ranks of each group, by name."""
    other = (victim + 1) % world
    return {
        "all": list(range(world)),
        "again": list(range(world)),
        "without another": [rank for rank in range(world) if rank != other],
        "without the victim": [rank for rank in range(world) if rank != victim],
    }


def slots_used(pg: ProcessGroup) -> int:
    """Return how often this rank has posted to its common lane."""
    shared = next(channel.shared for channel in comm_of(pg).channels if channel.shared is not None)
    return sum(shared.common_writer.posted)  # type: ignore[attr-defined]


class Rank:
    """The calls of one rank in all its groups, with their outcomes."""

    def __init__(self, number: int, scenario: dict[str, Any], report: Report) -> None:
        self.number = number
        self.scenario = scenario
        self.report = report
        self.is_victim = number == scenario["victim"]
        self.chance = random.Random(f"{scenario['seed']} {number}")
        self.groups: dict[str, ProcessGroup] = {}
        self.started: dict[str, list[tuple[np.ndarray, float, Work[Any]]]] = {}
        #: By group, each error once, with the time at which the error was found.
        self.found: dict[str, list[Any]] = {}

    async def run(self, world: ProcessGroup) -> None:
        """Make all calls, in a different order on each rank."""
        victim = self.scenario["victim"]
        self.groups["all"] = world
        for name, ranks in members(world.size(), victim).items():
            group = world if name == "all" else await world.split_group(ranks)
            if group is not None:
                self.groups[name] = group
                await group.barrier()
                self.started[name], self.found[name] = [], []
        await world.barrier()
        before = slots_used(world)
        order = [name for name in self.started for _ in range(CALLS)]
        self.chance.shuffle(order)
        for number, name in enumerate(order):
            if not self.found[name]:
                self._start(name)
            if self.is_victim and number == self.scenario["call"]:
                self.report({"acts": time.monotonic()})
                await self._act()
                if self.scenario["what"] == "close":
                    break
            if self.chance.random() < 0.3:
                await asyncio.sleep(0)
        await self._end()
        used = slots_used(world) - before if self.scenario["what"] == "stop" else None
        self.report({"rank": self.number, "found": self.found, "used": used})

    def _start(self, name: str) -> None:
        group, calls = self.groups[name], self.started[name]
        count = COUNTS[(len(calls) * 5 + len(name)) % len(COUNTS)]
        array = np.full(count, 2.0 ** group.rank() + len(calls))
        expected = 2.0 ** group.size() - 1 + group.size() * len(calls)
        try:
            calls.append((array, expected, group.allreduce(array)))
        except AiocollError as error:
            self._note(name, error)

    async def _act(self) -> None:
        what = self.scenario["what"]
        if what == "close":
            for group in self.groups.values():
                await group.shutdown()
        else:
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    async def _end(self) -> None:
        """Wait for all calls, first for the calls of the group without the victim."""
        for name in reversed(self.started):
            for array, expected, work in self.started[name]:
                try:
                    await work
                except AiocollError as error:
                    self._note(name, error)
                else:
                    assert (array == expected).all(), (name, array, expected)
            if name == "without the victim":
                self.report({"free": self.number})

    def _note(self, name: str, error: BaseException) -> None:
        now = time.monotonic()
        while error.__cause__ is not None:
            error = error.__cause__
        named: tuple[int, ...] = getattr(error, "ranks", ())
        ranks = [members(self.scenario["world"], self.scenario["victim"])[name][rank] for rank in named]
        found = [type(error).__name__, getattr(error, "how", None), ranks]
        if found not in [each for *each, _ in self.found[name]]:
            self.found[name].append([*found, now])


async def rank(scenario: dict[str, Any], number: int, port: int, report: Report) -> None:
    group = new_group(
        init_method=f"tcp://127.0.0.1:{port}",
        rank=number,
        world_size=scenario["world"],
        timeout=TIMEOUT,
        options=GroupOptions(transport="shm", job_key=b"k" * 32),
    )
    async with group as pg:
        await Rank(number, scenario, report).run(pg)


def resume_victim(scenario: dict[str, Any], pids: Sequence[int], reports: Reports) -> None:
    """Resume a stopped victim after the other ranks have ended their calls in the group without it, or all calls."""
    if scenario["what"] not in ("stop", "long"):
        return
    victim = pids[scenario["victim"]]
    key = "free" if scenario["what"] == "stop" else "rank"
    done = sum(key in each for each in reports) == scenario["world"] - 1
    if done and key in reports[-1] and any("acts" in each for each in reports):
        os.waitid(os.P_PID, victim, os.WSTOPPED | os.WNOWAIT)
        os.kill(victim, signal.SIGCONT)


if __name__ == "__main__":
    run_chosen(
        scenarios(),
        lambda each: run_forked(each["world"], partial(rank, each), partial(resume_victim, each), collects=True),
    )
