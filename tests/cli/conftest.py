"""The fixture `launch`, which runs `aiocoll run` as a shell does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

#: Seconds within which a launcher must end; it usually takes less than 10 % of this time.
LIMIT = 60


class Job:
    """A running launcher process, with its output."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.seen = ""

    def read(self, *lines: str) -> None:
        """Read standard output until all of `lines` have been printed."""
        missing = set(lines)
        while missing:
            line = self.process.stdout.readline()
            assert line, f"the output ended without {missing}; before: {self.seen}"
            self.seen += line
            missing.discard(line.rstrip("\n"))

    def finish(self) -> subprocess.CompletedProcess[Any]:
        """Wait for the end of the launcher; `stdout` has the lines that `read` has not returned."""
        out, err = self.process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


class Launch:
    """A callable that starts `aiocoll run` with a script in the directory `path`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._stack = stack

    def write(self, script: str) -> str:
        """Write `script` to a file; return its name."""
        file = self.path / "script.py"
        file.write_text(textwrap.dedent(script))
        return str(file)

    def __call__(
        self,
        *options: object,
        script: str | None = None,
        args: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        text: bool = True,
        **popen: Any,
    ) -> Job:
        program = [self.write(script), *args] if script is not None else []
        # Debug mode reports slow callbacks, and these tests compare the printed lines.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "aiocoll", "run", *map(str, [*options, *program])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=text,
            cwd=self.path,
            env={**kept, "PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})},
            # Under nohup, the launcher would inherit an ignored SIGHUP and survive its terminal.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            **popen,
        )
        self._stack.callback(_end, process)
        return Job(process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        pipe.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with ExitStack() as stack:
        yield Launch(tmp_path, stack)
