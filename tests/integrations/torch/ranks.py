"""Helpers that start torch programs with one process per rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["last_json", "run_launched", "run_ranks", "start_ranks"]

ROOT = Path(__file__).parents[3]


def start_ranks(module: str, first: str, world_size: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start `python -m tests.integrations.torch.MODULE FIRST RANK FOLDER` for each rank."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONASYNCIODEBUG": "0"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.integrations.torch.{module}", first]
    return [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]


def run_ranks(module: str, first: str, world_size: int, folder: Path, timeout: float = 120.0) -> list[str]:
    """Run ranks until they end; return their output. Ranks that hang are killed at the timeout."""
    ranks = start_ranks(module, first, world_size, folder)
    try:
        return [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def run_launched(launcher: list[str], program: str, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Run a program of this folder under a launcher; return the JSON files that its ranks write to `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCOLL_", "PYTHONASYNCIO"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, str(Path(__file__).with_name(program)), str(folder)],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def last_json(printed: str) -> dict[str, Any]:
    """Return the last JSON object in the output of a rank, or {} if there is none."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}
