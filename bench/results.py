"""What all launches of a run have found, and the statistics of it.

Of every launch the median over its iterations counts; of the launches the median. Systems are compared round by round,
since the launches of one round stand side by side; of these ratios it is the median again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from inflight import Case
from launch import Launch

from aiocoll.cli.measure import Figures, Timing


class Ratio(NamedTuple):
    """How many times faster than another system: the median of the rounds, the least and the most."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Summary:
    """One case on one system: medians over the launches, and the wrong elements of all of them."""

    launches: int
    iterations: int
    figures: Figures
    cpu: float
    wrong: int


@dataclass
class Results:
    """The rounds of one world size: for each the launches by the name of the system.

    Attributes:
        world_size: number of ranks.
        systems: names, in the order of the tables.
        rounds: what was launched; a system that has failed is missing from then on.
    """

    world_size: int
    systems: list[str]
    rounds: list[dict[str, Launch]] = field(default_factory=list)

    def failure(self, system: str) -> str | None:
        """Return why `system` did not measure everything."""
        return next((done[system].failure for done in self.rounds if system in done and done[system].failure), None)

    def summary(self, system: str, case: Case) -> Summary | None:
        """Return what is known of a case; None if it was never measured."""
        timings = [timing for timing in self._timings(system, case) if timing is not None]
        if not timings:
            return None
        each = [self._figures(case, timing)[:3] for timing in timings]
        return Summary(
            len(timings),
            sum(len(timing.nanoseconds) for timing in timings),
            Figures.at(
                case.each(self.world_size), self.world_size, *(median(values) for values in zip(*each, strict=True))
            ),
            median(timing.cpu for timing in timings) / case.inflight,
            sum(timing.wrong for timing in timings),
        )

    def ratio(self, case: Case, system: str, *others: str) -> Ratio | None:
        """Return how many times faster `system` is than the fastest of `others`; None without a common round."""
        found = []
        for number in range(len(self.rounds)):
            ours = self._p50(number, system, case)
            theirs = [time for other in others if (time := self._p50(number, other, case)) is not None]
            if ours is not None and theirs:
                found.append(min(theirs) / ours)
        return Ratio(median(found), min(found), max(found)) if found else None

    def cases(self, wanted: Callable[[Case], bool]) -> list[Case]:
        """Return the cases that any system has measured, in the order of the first launch that has them."""
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
        """Return those of one call's share."""
        return Figures.of(
            case.each(self.world_size), self.world_size, [each / case.inflight for each in timing.nanoseconds]
        )
