"""More processes than cores."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from aiocoll.testing import run_processes
from tests.testing.every import every_call


@pytest.mark.slow
def test_sixteen_processes_make_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert asyncio.run(run_processes(16, every_call, (1, 1000, 20_000))) == [3] * 16
    assert not list(tmp_path.iterdir())
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
