"""A rank is killed, stopped or closed after it has posted and before it has read: no other group is disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.killing import LIMIT
from tests.chaos.outboxes import CALLS, WHAT, WORLD_SIZES, members, scenarios

ROOT = Path(__file__).parents[2]
#: Seconds until a killed rank is known (contract), and one that is stopped.
SOON = {"kill": 1.0, "long": 6.0}
#: What the others find: the error, and how the rank was lost.
FOUND = {
    "kill": [("PeerLostError", "killed")],
    "close": [("PeerLostError", "left")],
    "long": [("PeerLostError", "stopped")],
}


def play(chosen: list[int], temporary: Path) -> list[dict[str, Any]]:
    """Run these scenarios; return what was said."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AIOCOLL_") and name != "PYTHONASYNCIODEBUG"
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.outboxes", json.dumps(chosen)],
        cwd=ROOT,
        # Threads of a linear algebra library would not survive the fork.
        env=environment | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "error", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT + 15 * len(chosen),
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert not list(temporary.iterdir())
    return [{**json.loads(line), "log": done.stderr} for line in done.stdout.splitlines()]


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
def test_some_ranks_between_post_and_read(what: str, tmp_path: Path) -> None:
    for run in play(few(what), tmp_path):
        judge(run)


@pytest.mark.soak
@pytest.mark.parametrize("what", WHAT)
def test_every_rank_between_post_and_read(what: str, tmp_path: Path) -> None:
    runs = play([index for index, each in enumerate(scenarios()) if each["what"] == what], tmp_path)
    assert {run["world"] for run in runs} == set(WORLD_SIZES)
    for run in runs:
        judge(run)
