"""A helper that runs Python code in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_code(code: str) -> str:
    """Run Python code in a new process where warnings are errors; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip()
