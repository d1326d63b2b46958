"""Ranks that are killed, stopped, cancelled or aborted at random moments: right results, or errors with the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.forked_ranks import run_scenarios
from tests.chaos.random_disturbances import CALLS, WHAT, scenarios

#: The number of runs of each disturbance in `make test`.
FEW = 4
#: The error that the other ranks raise, by disturbance.
RAISED = {"kill": "PeerLostError", "abort": "GroupError"}


def check_run(run: dict[str, Any]) -> None:
    """Check how each rank ended; a rank with a wrong result ends with exit code 1."""
    what, world, victim = run["what"], run["world"], run["victim"]
    assert run["ends"] == [-9 if what == "kill" and rank == victim else 0 for rank in range(world)], run
    reports = {each["rank"]: each for each in run["reports"] if "raised" in each}
    assert set(reports) == set(range(world)) - ({victim} if what == "kill" else set()), run
    for each in reports.values():
        if what in RAISED:
            assert each["raised"] == RAISED[what], run
        else:
            assert (each["raised"], each["steps"]) == ("NoneType", CALLS), run
        if what == "kill":
            assert each["lost"] == [victim], run


@pytest.mark.slow
@pytest.mark.parametrize("what", WHAT)
def test_disturbed_calls_return_correct_results_or_raise_errors(what: str, tmp_path: Path) -> None:
    chosen = [number for number, each in enumerate(scenarios()) if each["what"] == what][:FEW]
    runs, _ = run_scenarios("tests.chaos.random_disturbances", chosen, tmp_path)
    assert len(runs) == FEW
    for run in runs:
        check_run(run)


@pytest.mark.soak
def test_disturbed_calls_return_correct_results_or_raise_errors_in_400_runs(tmp_path: Path) -> None:
    all_numbers = list(range(len(scenarios())))
    assert len(all_numbers) == 400
    runs, _ = run_scenarios("tests.chaos.random_disturbances", all_numbers, tmp_path)
    for run in runs:
        check_run(run)
