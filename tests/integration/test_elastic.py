"""An elastic program whose processes are killed at random moments: also rank 0, and two processes at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.elastic_job import Plan, supervise


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_elastic_job_survives_killed_processes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_kills(Plan(size, kills=6), tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4, 7])
def test_elastic_job_survives_200_killed_processes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_kills(Plan(size, kills=200), tmp_path, monkeypatch)


def run_with_kills(plan: Plan, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("PYTHONASYNCIODEBUG", raising=False)
    counts = asyncio.run(supervise(plan))
    assert (counts["kills"], counts["of rank 0"] > 0, counts["two at once"] > 0) == (plan.kills, True, plan.size > 2)
    assert not list(temporary.iterdir())
    assert not list(Path("/dev/shm").glob("aiocoll*"))
