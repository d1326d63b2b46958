"""A process that cannot open files: calls work if their modules are loaded, other calls fail with a clear error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("descriptor_limit.py"))


@pytest.mark.slow
@pytest.mark.parametrize("given", [["tcp"], ["unix"], ["shm"], ["tcp", "sparse"]], ids=" ".join)
def test_calls_work_without_a_free_file_descriptor(given: list[str]) -> None:
    done = subprocess.run([sys.executable, PROGRAM, *given], capture_output=True, text=True, timeout=60, check=True)
    errors = json.loads(done.stdout)
    needed_by = {"object messages": "objects", "objects": "objects", "sparse": "sparse arrays"}
    if "sparse" not in given:
        del needed_by["sparse"]
    assert errors.keys() == {f"{call} {rank}" for call in needed_by for rank in range(2)}
    for call, error in errors.items():
        what = needed_by[call[:-2]]
        assert error.startswith(
            f"BackendUnavailableError: cannot load the modules that {what} need: [Errno 24] Too many open files"
        )
        assert error.endswith("if too many files are open, raise ulimit -n")
