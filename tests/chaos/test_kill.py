"""A rank is killed in the middle of a call: the others learn which, within a second, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.forked import play
from tests.chaos.killing import CALLS, SINGLE_COPY, SMALL, TRANSPORTS, WORLD_SIZE, scenarios

#: Seconds (contract).
SOON = 1.0
#: Kills in `make test`.
FEW = 20


def kill(chosen: list[int], temporary: Path) -> list[dict[str, Any]]:
    """Run these scenarios; return what was said."""
    runs, log = play("tests.chaos.killing", chosen, temporary)
    assert log == ""
    return runs


def judge(runs: list[dict[str, Any]]) -> np.ndarray:
    """Check what the survivors raised; return the seconds it took each of them."""
    taken = []
    for run in runs:
        victim = run["victim"]
        assert run["ends"] == [-9 if rank == victim else 0 for rank in range(WORLD_SIZE)], run
        (killed,) = [told["killed"] for told in run["said"] if "killed" in told]
        survivors = [told for told in run["said"] if "rank" in told]
        assert len(survivors) == WORLD_SIZE - 1
        for told in survivors:
            found = (told["raised"], told["how"], told["ranks"], told["left"])
            assert found == ("PeerLostError", "killed", [victim], []), run
            taken.append(told["at"] - killed)
    return np.array(taken)


def few() -> list[int]:
    """Return some scenarios: every kind of call, and everything else that can be in it, at least once."""
    everything = scenarios()
    step = len(everything) / FEW
    chosen = [int(number * step) + number % 4 for number in range(FEW)]
    picked = [everything[index] for index in chosen]
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
    taken = judge(kill(few(), tmp_path))
    assert np.percentile(taken, 99) <= SOON, sorted(taken)


@pytest.mark.soak
def test_killed_rank_is_reported_within_a_second_in_every_call(tmp_path: Path) -> None:
    everything = list(range(len(scenarios())))
    assert len(everything) >= 200
    taken = judge(kill(everything, tmp_path))
    assert np.percentile(taken, 99) <= SOON, sorted(taken)[-20:]
