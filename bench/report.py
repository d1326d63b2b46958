"""Report of a benchmark run: a text in Markdown, and the figures as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from environments import REQUIREMENTS
from limits import OF_BOUND, Verdict, verdicts
from loop_lag import Found, lag_table, longest
from machine import machine
from markdown import ranks_of, table
from results import Results
from roofline import Roofline
from systems import System
from tables import (
    allreduce_details,
    awaited_table,
    blocking_table,
    bound_rows,
    bound_verdicts,
    failure_table,
    inflight_table,
    lag_verdict,
    roofline_table,
    verdict_table,
)

from aiocoll.machine_load import MAX_LOAD, MachineLoad

HEADING = """# aiocoll and Gloo, MPICH, Open MPI

`make bench` writes this report. Arrays are float32, and the reduction is SUM.

- **Launches.** A launch starts one process per rank. Each round launches each system once, and begins with another
  system. The load is measured before the first launch and between all launches. A launch during which others took more
  than 0.3 cores is repeated, up to five times, and the launch with the least load counts. Others are processes that the
  benchmark has not started, and other virtual machines (steal).
- **Times.** The time of an iteration is that of its slowest rank. p50, p95 and p99 are percentiles of the iterations of
  a launch; a table has the median over the launches. In parentheses, or as *fastest tenth*: the tenth percentile.
- **Ratios.** "×" is the median over the rounds of the ratio of two p50 of the same round: how many times faster aiocoll
  is. In parentheses: the least and the greatest ratio. With several peers, the fastest peer of each round counts.
- **Sizes.** The size is that of one rank's array, or of one block of allgather, reduce_scatter, alltoall, gather and
  scatter. algbw is size / p50, of all blocks together. busbw is algbw times the bytes that a link carries per byte, as
  in nccl-tests: 2 (p-1)/p for allreduce, (p-1)/p for collectives of blocks, else 1.
- **Calls.** There is no barrier between iterations. Where data flows one way (broadcast, reduce, gather, scatter, scan)
  the time is that of a stream of calls. #wrong counts wrong elements. CPU is that of all ranks together."""

AWAITED_WORK = """Calls inside an event loop that keeps running: aiocoll, and the alternatives for such a program."""

BLOCKING_LIMIT = """Peers that block the thread, and so the event loop: what the machine allows without a loop."""

SUMMED = """np.copyto and np.add count the bytes read plus those written, of all processes together, on arrays that
fit in no cache. tcp and unix: one sender, one receiver. Last: round trips of a shared flag that both sides poll, and
of one byte through a blocking socket."""

COLUMNS = (
    *("ranks", "system", "collective", "bytes", "in_flight", "launches", "iterations", "p50_us", "p95_us", "p99_us"),
    *("algbw_gbs", "busbw_gbs", "cpu_us", "wrong", "tenth_us", "disturbed"),
)


@dataclass
class Report:
    """The contents of a benchmark report: systems, machine, results and loads. Each part may be empty.

    Attributes:
        systems: the compared systems, the one of aiocoll that tables compare first.
        skipped: systems that are not installed, and why.
        before: the load before the first launch.
        machine: a description of the machine.
        results: results of each world size.
        rooflines: rooflines of each world size.
        lags: loop lags of each world size.
        seconds: duration of the run.
        busy: processes that each kept a core busy during the run.
    """

    systems: Sequence[System]
    skipped: dict[str, str]
    before: MachineLoad
    machine: str = field(init=False)
    results: list[Results] = field(default_factory=list)
    rooflines: list[Roofline] = field(default_factory=list)
    lags: dict[int, Found] = field(default_factory=dict)
    seconds: float = 0.0
    busy: int = 0

    def __post_init__(self) -> None:
        self.machine = machine(self._versions(), self.before)
        if self.busy:
            self.machine += f"\\\nwith {self.busy} other processes that each keep a core busy"

    def text(self) -> str:
        """Return the report in Markdown."""
        compared = self.systems[0].name
        parts = [HEADING, self.machine, self._waits(), failure_table(self.skipped, self.results)]
        parts.append(verdict_table(self._verdicts()))
        for title, text, make in (
            ("On the same work", AWAITED_WORK, awaited_table),
            ("Against the limit", BLOCKING_LIMIT, blocking_table),
        ):
            tables = [each for results in self.results if (each := make(results, compared)) is not None]
            parts += [f"## {title}", text, *tables] if tables else []
        details = [each for results in self.results if (each := allreduce_details(results)) is not None]
        parts += ["## Allreduce, all systems", *details] if details else []
        many = inflight_table(self.results)
        parts += ["## Many calls in flight", many] if many is not None else []
        if self.rooflines:
            parts += ["## Speed of the machine", SUMMED, roofline_table(self.rooflines), *self._bounds()]
        if self.lags:
            parts += ["## Time in the event loop", *(lag_table(*each) for each in self.lags.items())]
            parts.append("Timers have a granularity of 1 ms, which alone makes a sleep up to 1 ms late.")
        parts.append(self._end())
        return "\n\n".join(part for part in parts if part is not None)

    def _end(self) -> str:
        """Return the report's last line: the duration of the run, and the load during the launches."""
        launches = [each for results in self.results for done in results.rounds for each in done.values()]
        loads = [each.load for each in launches if each.load is not None]
        totals = [load.total for load in loads if load.total is not None]
        repeats, high = sum(each.repeats for each in launches), sum(load.is_high for load in loads)
        text = f"Took {self.seconds / 60:.1f} minutes: {len(launches)} launches and {repeats} repetitions."
        if not totals:
            return f"{text} The load during the launches is unknown."
        return (
            f"{text} Others took {median(totals):.2f} cores during the median launch, {max(totals):.2f} at most, and "
            f"more than {MAX_LOAD:g} during {high}."
        )

    def _versions(self) -> list[str]:
        there = dict.fromkeys(each.environment for each in self.systems if each.environment is not None)
        found = [each for name in there for each in REQUIREMENTS[name][0]]
        return [each.replace("==", " ") for each in dict.fromkeys(found)]

    def _waits(self) -> str:
        named = {("aiocoll" if each.library == "aiocoll" else each.name): each.waits for each in self.systems}
        lines = [f"- {name}: {waits}." for name, waits in named.items()]
        return "\n".join(["A rank waits for another as follows:\n", *lines])

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
    """Write a CSV file with one row for each case of each system."""
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
                                *(f"{summary.cpu * 1e6:.3f}", summary.wrong, f"{summary.tenth * 1e6:.3f}"),
                                int(results.is_disturbed(case, [system])),
                            ]
                        )
