"""Ranks in separate processes, one of which does not read the posts of the other ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import LIMIT

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks

JOB = str(Path(__file__).with_name("outboxes_job.py"))
WORLD = 4
#: The number of calls per rank. While links open or a rank is late, calls use frames instead of slots.
CALLS = 300

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or sys.platform != "linux",
    reason="needs root, unshare and Linux for process namespaces",
)


def run(ranks: Ranks, port: int, what: str, *before: str) -> list[list[object]]:
    """Return for each rank except the last whether sums were right, a further result, and the number of used slots."""
    command = [*before, JOB] if not before else [*before, sys.executable, JOB]
    processes = [ranks.start(*command, what, f"tcp://127.0.0.1:{port}", str(rank), str(WORLD)) for rank in range(WORLD)]
    results = []
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=LIMIT)
        killed = what == "die" and rank == WORLD - 1
        assert process.returncode == (-9 if killed else 0), err
        if rank < WORLD - 1:
            results.append(json.loads(out))
    return results


@pytest.mark.slow
def test_stopped_reader_makes_another_group_use_frames_instead_of_waiting(ranks: Ranks, port: int) -> None:
    for right, early, used in run(ranks, port, "stop"):
        assert right
        assert early, "the other group waited for the stopped rank"
        assert isinstance(used, int)
        assert used > CALLS // 2, "the slots were not freed"


@pytest.mark.slow
def test_killed_reader_does_not_keep_slots_occupied(ranks: Ranks, port: int) -> None:
    for right, named, used in run(ranks, port, "die"):
        assert right
        assert named
        assert isinstance(used, int)
        assert used > CALLS // 2


@pytest.mark.slow
def test_contributions_of_a_rank_that_has_left_are_still_read(ranks: Ranks, port: int) -> None:
    assert run(ranks, port, "leave") == [[True, True, 0]] * (WORLD - 1)


@needs_namespaces
@pytest.mark.slow
def test_ranks_in_separate_process_namespaces_share_outboxes(ranks: Ranks, port: int) -> None:
    unshare = "import os, sys; os.execvp('unshare', ['unshare', '--pid', '--fork', '--kill-child', *sys.argv[1:]])"
    assert run(ranks, port, "leave", "-c", unshare) == [[True, True, 0]] * (WORLD - 1)
