"""The report of a run: everything in one text, and the figures as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environments import REQUIREMENTS
from lag import Found, lag_table, longest
from limits import OF_BOUND, Verdict, verdicts
from machine import machine
from markdown import ranks_of, table
from results import Results
from roofline import Roofline
from systems import System
from tables import (
    allreduce_details,
    allreduce_ratios,
    bound_rows,
    bound_verdicts,
    collective_table,
    failure_table,
    inflight_table,
    lag_verdict,
    roofline_table,
    verdict_table,
)

HEADING = """# aiocoll beside Gloo, MPICH and Open MPI

`make bench` writes this report. float32, SUM. A launch starts one process per rank; every round launches every system
once, and starts with another one. The time of an iteration is that of its slowest rank; p50, p95 and p99 are taken of
the iterations of a launch, and of these the median over the launches. "Times faster" is the median over the rounds of
the ratio of the two p50 that stand side by side in a round; behind it the least and the most of the rounds. The size
is that of one rank's array, or of one block of allgather, reduce_scatter, alltoall, gather and scatter. algbw is size /
p50, of blocks all of them together; busbw is that times what a link carries per byte, as in nccl-tests: 2 (p-1)/p for
allreduce, (p-1)/p for collectives of blocks, else 1. There is no barrier between iterations, so where data flows one
way (broadcast, reduce, gather, scatter, scan) the time is that of a stream of calls. #wrong counts elements that are
not what they should be. CPU is that of all ranks together."""

SUMMED = """np.copyto and np.add count the bytes read plus those written, of all processes together, on arrays no cache
holds. tcp and unix: one sender, one receiver. Last: round trips of a shared flag that both sides poll, and of one byte
through a blocking socket."""

COLUMNS = (
    *("ranks", "system", "collective", "bytes", "in_flight", "launches", "iterations", "p50_us", "p95_us", "p99_us"),
    *("algbw_gbs", "busbw_gbs", "cpu_us", "wrong"),
)


@dataclass
class Report:
    """What was found so far; each part may be empty. `busy` processes kept a core busy beside."""

    systems: Sequence[System]
    skipped: dict[str, str]
    machine: str = field(init=False)
    results: list[Results] = field(default_factory=list)
    rooflines: list[Roofline] = field(default_factory=list)
    lags: dict[int, Found] = field(default_factory=dict)
    seconds: float = 0.0
    busy: int = 0

    def __post_init__(self) -> None:
        self.machine = machine(self._versions())  # as it is before anything runs
        if self.busy:
            self.machine += f"\\\nwith {self.busy} processes beside that keep a core busy each"

    def text(self) -> str:
        """Return all of it, in Markdown."""
        ours = self.systems[0].name
        parts = [HEADING, self.machine, self._waits(), failure_table(self.skipped, self.results)]
        parts.append(verdict_table(self._verdicts()))
        if self.results:
            parts.append("## Allreduce")
            parts += [allreduce_ratios(results, ours) for results in self.results]
            parts += [allreduce_details(results) for results in self.results]
        others = [part for results in self.results if (part := collective_table(results, ours)) is not None]
        parts += ["## The other collectives", *others] if others else []
        many = inflight_table(self.results)
        parts += ["## Many in flight", many] if many is not None else []
        if self.rooflines:
            parts += ["## What the machine can do", SUMMED, roofline_table(self.rooflines), *self._bounds()]
        if self.lags:
            parts += ["## What holds the event loop", *(lag_table(*each) for each in self.lags.items())]
            parts.append("Timers have a granularity of 1 ms, which alone makes a sleep up to 1 ms late.")
        parts.append(f"Took {self.seconds / 60:.1f} minutes. At the end: {machine().splitlines()[-1]}")
        return "\n\n".join(part for part in parts if part is not None)

    def _versions(self) -> list[str]:
        there = dict.fromkeys(each.environment for each in self.systems if each.environment is not None)
        found = [each for name in there for each in REQUIREMENTS[name][0]]
        return [each.replace("==", " ") for each in dict.fromkeys(found)]

    def _waits(self) -> str:
        named = {("aiocoll" if each.library == "aiocoll" else each.name): each.waits for each in self.systems}
        lines = [f"- {name}: {waits}." for name, waits in named.items()]
        return "\n".join(["How a rank waits for another:\n", *lines])

    def _verdicts(self) -> list[Verdict]:
        found = list(verdicts(self.results))
        for results in self.results:
            for roofline in self.rooflines:
                if roofline.world_size == results.world_size:
                    found += bound_verdicts(results, roofline)
        for world_size, settings in self.lags.items():
            for (loop, transport), ranks in settings.items():
                if not isinstance(ranks, str):
                    found.append(lag_verdict(f"{loop}, {transport}, {ranks_of(world_size)}", longest(ranks)))
        return found

    def _bounds(self) -> list[str]:
        parts = []
        for results, roofline in zip(self.results, self.rooflines, strict=False):
            rows = [(*row[:4], f"{row[4]:.2f}") for row in bound_rows(results, roofline)]
            if rows:
                parts.append(
                    f"### Large allreduces and their bound, {ranks_of(results.world_size)}\n\n"
                    "The bound: every rank reads its array and writes the result, at the speed of np.copyto. "
                    f"The limit is {OF_BOUND:g} times that.\n\n"
                    + table(("size", "system", "p50 ms", "bound ms", "times the bound"), rows)
                )
        return parts


def write_csv(path: Path, all_results: Sequence[Results]) -> None:
    """Write a row for every case of every system."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for results in all_results:
            for case in results.cases(lambda _: True):
                for system in results.systems:
                    summary = results.summary(system, case)
                    if summary is not None:
                        times, widths = summary.figures[:3], summary.figures[3:]
                        writer.writerow(
                            [
                                *(results.world_size, system, case.kind, case.size(results.world_size), case.inflight),
                                *(summary.launches, summary.iterations),
                                *(f"{value * 1e6:.3f}" for value in times),
                                *(f"{value / 1e9:.6f}" for value in widths),
                                *(f"{summary.cpu * 1e6:.3f}", summary.wrong),
                            ]
                        )
