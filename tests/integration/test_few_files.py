"""A process that may open no file more: what was loaded goes on, and what was not fails by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("few_files.py"))


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
def test_calls_without_a_descriptor_left(transport: str) -> None:
    pytest.importorskip("resource")
    pytest.importorskip("scipy")
    done = subprocess.run([sys.executable, PROGRAM, transport], capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(done.stdout)
    later = {"object messages": "objects", "objects": "objects", "sparse": "sparse arrays"}
    assert told.keys() == {f"{call} {rank}" for call in later for rank in range(2)}
    for call, error in told.items():
        what = later[call[:-2]]
        assert error.startswith(
            f"BackendUnavailableError: cannot load what {what} take: [Errno 24] Too many open files"
        )
        assert error.endswith("if too many files are open, raise ulimit -n")
