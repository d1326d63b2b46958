"""Ranks that end or stop between posting data in shared memory and reading it: no other group is disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.forked_ranks import LIMIT, run_scenarios
from tests.chaos.outboxes import CALLS, WHAT, WORLD_SIZES, members, scenarios

#: Seconds within which a killed rank ("kill") and a stopped rank ("long") must be reported.
SOON = {"kill": 1.0, "long": 6.0}
#: By event, the errors of the other ranks, with the reported kind of loss.
FOUND = {
    "kill": [("PeerLostError", "killed")],
    "close": [("PeerLostError", "left")],
    "long": [("PeerLostError", "stopped")],
}


def check_run(run: dict[str, Any]) -> None:
    """Check the outcome of the calls of each rank in each group."""
    what, world, victim = run["what"], run["world"], run["victim"]
    assert run["ends"] == [-9 if what == "kill" and rank == victim else 0 for rank in range(world)], run
    (acted,) = [report["acts"] for report in run["reports"] if "acts" in report]
    reports = {each["rank"]: each for each in run["reports"] if "rank" in each}
    assert set(reports) == set(range(world)) - ({victim} if what == "kill" else set())
    for rank, each in reports.items():
        if what == "stop":
            assert not any(each["found"].values()), run
            assert each["used"] > CALLS // 2, f"only {each['used']} posts to the common lane"
            continue
        if rank == victim:
            continue  # the victim may have been declared lost, or have closed its groups
        for name, found in each["found"].items():
            if victim not in members(world, victim)[name]:
                assert not found, run
                continue
            assert found, run
            assert all((error, how) in FOUND[what] and ranks == [victim] for error, how, ranks, _ in found), run
            assert max(at for *_, at in found) - acted <= SOON.get(what, LIMIT), run


def few_numbers(what: str) -> list[int]:
    """Return the numbers of some scenarios: one for each world size."""
    every = list(enumerate(scenarios()))
    return [
        next(
            index
            for index, each in every
            if each["what"] == what and each["world"] == world and each["victim"] == world % 3
        )
        for world in WORLD_SIZES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "stop", "close"])
def test_death_of_a_rank_between_post_and_read_leads_to_correct_results_or_errors(what: str, tmp_path: Path) -> None:
    runs, log = run_scenarios("tests.chaos.outboxes", few_numbers(what), tmp_path)
    for run in runs:
        check_run(run | {"log": log})


@pytest.mark.soak
@pytest.mark.parametrize("what", WHAT)
def test_death_of_any_rank_between_post_and_read_leads_to_correct_results_or_errors(what: str, tmp_path: Path) -> None:
    chosen = [index for index, each in enumerate(scenarios()) if each["what"] == what]
    runs, log = run_scenarios("tests.chaos.outboxes", chosen, tmp_path)
    assert {run["world"] for run in runs} == set(WORLD_SIZES)
    for run in runs:
        check_run(run | {"log": log})
