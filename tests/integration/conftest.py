"""Fixtures that start ranks of `program.py` as processes, and check that the ranks leave no temporary files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("program.py"))
#: The timeout of a rank in seconds; each rank usually takes less than 10 % of this time.
LIMIT = 60
#: The job key of all jobs in these tests.
KEY = b"of this test and no other"


class Ranks:
    """A callable that starts `program.py` on each rank, and returns the printed results."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        key = path / "job.key"
        key.touch(mode=0o600)
        key.write_bytes(KEY)
        self.temporary = path / "temporary"
        self.temporary.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_")}
        # Disable asyncio's debug mode, which reports slow callbacks; these tests expect no error output.
        kept.pop("PYTHONASYNCIODEBUG", None)
        self.environment = kept | {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            "AIOCOLL_JOB_KEY_FILE": str(key),
            "PYTHONWARNINGS": "error",
        }

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a Python process, which is killed at the end of the test if it still runs."""
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**self.environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(_kill, process)
        return process

    def __call__(
        self,
        what: str,
        method: str,
        world_size: int,
        *,
        numbers: bool = True,
        env: Mapping[str, str] | None = None,
        killed: Sequence[int] = (),
    ) -> list[Any]:
        """Run `program.py` on all ranks; return the result of each rank, or None for the `killed` ranks.

        With `numbers`, rank and world size are on the command line, otherwise only in the environment.
        """
        processes = []
        for rank in range(world_size):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            given = [str(rank), str(world_size)] if numbers else []
            processes.append(
                self.start(PROGRAM, what, method, *given, env={**({} if numbers else place), **(env or {})})
            )
        results: list[Any] = []
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=LIMIT)
            assert err == "", f"rank {rank}: {err}"
            assert process.returncode == (-9 if rank in killed else 0)
            if rank in killed:
                results.append(None)
                continue
            outcome = json.loads(out)
            assert (outcome["rank"], outcome["size"]) == (rank, world_size)
            results.append(outcome["result"])
        assert not list(self.temporary.iterdir())
        return results


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(tmp_path, stack)
