"""Results of all launches of a run, and their statistics.

A time is the median over the launches of the medians over their iterations. A ratio of two systems is the median of
the ratios of the rounds: the launches of one round follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np
from inflight import Case
from launch import CaseTimings, Launch

from aiocoll.cli.measure import Figures, Timing


class Ratio(NamedTuple):
    """A speed relative to another system: the median, the minimum and the maximum over the rounds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Summary:
    """The statistics of a case on one system: medians over the launches, and sums.

    Attributes:
        launches: number of launches.
        iterations: iterations of all launches.
        figures: times of one call.
        tenth: seconds within which the fastest tenth of the calls ended.
        cpu: CPU seconds of one call, of all ranks together.
        wrong: wrong elements of all launches.
    """

    launches: int
    iterations: int
    figures: Figures
    tenth: float
    cpu: float
    wrong: int


@dataclass
class Results:
    """The launches of one world size, in rounds.

    Attributes:
        world_size: number of ranks.
        systems: names, in the order of the tables.
        rounds: the launches of each round, by system; a system that has failed is missing in later rounds.
    """

    world_size: int
    systems: list[str]
    rounds: list[dict[str, Launch[CaseTimings]]] = field(default_factory=list)

    def failure(self, system: str) -> str | None:
        """Return the text of the first failure of `system`; None if it has not failed."""
        return next((done[system].failure for done in self.rounds if system in done and done[system].failure), None)

    def summary(self, system: str, case: Case) -> Summary | None:
        """Return the statistics of a case on `system`; None if it was never measured."""
        timings = [timing for timing in self._timings(system, case) if timing is not None]
        if not timings:
            return None
        each = [self._figures(case, timing)[:3] for timing in timings]
        return Summary(
            len(timings),
            sum(len(timing.nanoseconds) for timing in timings),
            Figures.from_percentiles(
                case.each(self.world_size), self.world_size, *(median(values) for values in zip(*each, strict=True))
            ),
            median(float(np.percentile(timing.nanoseconds, 10)) for timing in timings) / 1e9 / case.inflight,
            median(timing.cpu for timing in timings) / case.inflight,
            sum(timing.wrong for timing in timings),
        )

    def ratio(self, case: Case, system: str, *others: str) -> Ratio | None:
        """Return how many times faster `system` is than the fastest of `others`; None if no round has measured both."""
        found = []
        for number in range(len(self.rounds)):
            own = self._p50(number, system, case)
            rivals = [time for other in others if (time := self._p50(number, other, case)) is not None]
            if own is not None and rivals:
                found.append(min(rivals) / own)
        return Ratio(median(found), min(found), max(found)) if found else None

    def is_disturbed(self, case: Case, systems: Sequence[str]) -> bool:
        """Return whether the load was high during a launch that has measured `case` with one of `systems`."""
        launches = (done[system] for done in self.rounds for system in systems if system in done)
        return any(each.load is not None and each.load.is_high for each in launches if case in each.timings)

    def cases(self, wanted: Callable[[Case], bool]) -> list[Case]:
        """Return the wanted cases that any system has measured, in the order of the launches."""
        found: dict[Case, None] = {}
        for done in self.rounds:
            for each in done.values():
                found |= dict.fromkeys(case for case in each.timings if wanted(case))
        return list(found)

    def _timings(self, system: str, case: Case) -> Sequence[Timing | None]:
        return [done[system].timings.get(case) if system in done else None for done in self.rounds]

    def _p50(self, number: int, system: str, case: Case) -> float | None:
        timing = self._timings(system, case)[number]
        return None if timing is None else self._figures(case, timing).p50

    def _figures(self, case: Case, timing: Timing) -> Figures:
        """Compute the figures of one call, from the times of all calls in flight together."""
        return Figures.of(
            case.each(self.world_size), self.world_size, [each / case.inflight for each in timing.nanoseconds]
        )
