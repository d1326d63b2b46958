"""Processes that are the ranks of a program of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_ranks", "start_ranks"]

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
    """Run ranks to their ends; return what they print. Those that hang are killed."""
    ranks = start_ranks(module, first, world_size, folder)
    try:
        return [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
