"""Ranks that are killed during a call: the others report the rank within a second, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.forked_ranks import run_scenarios
from tests.chaos.killed_ranks import CALLS, SINGLE_COPY, SMALL, TRANSPORTS, WORLD_SIZE, scenarios

#: Seconds within which the other ranks must report the killed rank.
SOON = 1.0
#: The number of kills in `make test`.
FEW = 20


def results_of(chosen: list[int], temporary: Path) -> list[dict[str, Any]]:
    """Run the given scenarios; return their results."""
    runs, log = run_scenarios("tests.chaos.killed_ranks", chosen, temporary)
    assert log == ""
    return runs


def detection_times(runs: list[dict[str, Any]]) -> np.ndarray:
    """Check the errors of the surviving ranks; return the seconds until each error was raised."""
    taken = []
    for run in runs:
        victim = run["victim"]
        assert run["ends"] == [-9 if rank == victim else 0 for rank in range(WORLD_SIZE)], run
        (killed,) = [report["killed"] for report in run["reports"] if "killed" in report]
        survivors = [report for report in run["reports"] if "rank" in report]
        assert len(survivors) == WORLD_SIZE - 1
        for report in survivors:
            found = (report["raised"], report["how"], report["ranks"], report["left"])
            assert found == ("PeerLostError", "killed", [victim], []), run
            taken.append(report["at"] - killed)
    return np.array(taken)


def few_numbers() -> list[int]:
    """Return the numbers of some scenarios that cover every kind of call, victim, transport and size."""
    every = scenarios()
    step = len(every) / FEW
    chosen = [int(number * step) + number % 4 for number in range(FEW)]
    picked = [every[index] for index in chosen]
    for name, values in (
        ("kind", set(CALLS)),
        ("victim", set(range(WORLD_SIZE))),
        ("transport", {*TRANSPORTS, SINGLE_COPY}),
    ):
        assert {each[name] for each in picked} == values
    assert {each["count"] == SMALL for each in picked} == {True, False}
    return chosen


@pytest.mark.slow
def test_killed_rank_is_reported_within_a_second(tmp_path: Path) -> None:
    taken = detection_times(results_of(few_numbers(), tmp_path))
    assert np.percentile(taken, 99) <= SOON, sorted(taken)


@pytest.mark.soak
def test_killed_rank_is_reported_within_a_second_in_every_kind_of_call(tmp_path: Path) -> None:
    all_numbers = list(range(len(scenarios())))
    assert len(all_numbers) >= 200
    taken = detection_times(results_of(all_numbers, tmp_path))
    assert np.percentile(taken, 99) <= SOON, sorted(taken)[-20:]
