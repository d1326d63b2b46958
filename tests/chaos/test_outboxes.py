"""A rank is killed, stopped or closed after it has posted and before it has read: no other group is disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.forked import LIMIT, play
from tests.chaos.outboxes import CALLS, WHAT, WORLD_SIZES, members, scenarios

#: Seconds until a killed rank is known (contract), and one that is stopped.
SOON = {"kill": 1.0, "long": 6.0}
#: What the others find: the error, and how the rank was lost.
FOUND = {
    "kill": [("PeerLostError", "killed")],
    "close": [("PeerLostError", "left")],
    "long": [("PeerLostError", "stopped")],
}


def judge(run: dict[str, Any]) -> None:
    """Check how the calls of each rank in each group ended."""
    what, world, victim = run["what"], run["world"], run["victim"]
    assert run["ends"] == [-9 if what == "kill" and rank == victim else 0 for rank in range(world)], run
    (acted,) = [told["acts"] for told in run["said"] if "acts" in told]
    told = {each["rank"]: each for each in run["said"] if "rank" in each}
    assert set(told) == set(range(world)) - ({victim} if what == "kill" else set())
    for rank, each in told.items():
        if what == "stop":
            assert not any(each["found"].values()), run
            assert each["used"] > CALLS // 2, "most of what several ranks read is posted once"
            continue
        if rank == victim:
            continue  # it may have been given up, or have closed its groups
        for name, found in each["found"].items():
            if victim not in members(world, victim)[name]:
                assert not found, run
                continue
            assert found, run
            assert all((error, how) in FOUND[what] and ranks == [victim] for error, how, ranks, _ in found), run
            assert max(at for *_, at in found) - acted <= SOON.get(what, LIMIT), run


def few(what: str) -> list[int]:
    """Return some scenarios: one of each size."""
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
def test_rank_ended_between_post_and_read_gives_right_results_or_errors(what: str, tmp_path: Path) -> None:
    runs, log = play("tests.chaos.outboxes", few(what), tmp_path)
    for run in runs:
        judge(run | {"log": log})


@pytest.mark.soak
@pytest.mark.parametrize("what", WHAT)
def test_every_rank_ended_between_post_and_read_gives_right_results_or_errors(what: str, tmp_path: Path) -> None:
    chosen = [index for index, each in enumerate(scenarios()) if each["what"] == what]
    runs, log = play("tests.chaos.outboxes", chosen, tmp_path)
    assert {run["world"] for run in runs} == set(WORLD_SIZES)
    for run in runs:
        judge(run | {"log": log})
