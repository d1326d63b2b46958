"""Log files with the output of ranks, which only their owner can read, because output may contain secrets.

Each job has a folder, named by the time and random letters. In it, ``restart-K`` has ``rank-R.out`` and ``rank-R.err``
of each rank that was started in restart K; 0 is the first start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from aiocoll.cli.sink import Sink

__all__ = ["Logs"]


class Logs:
    """The log folder of a job.

    Args:
        parent: the folder in which it is created; created too if it does not exist.
        trouble: called from any thread with a message if a file cannot be written. The job continues.

    Attributes:
        path: the path of the folder.
        complete: whether the files have all output.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, parent: str, trouble: Callable[[str], object]) -> None:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        self.path = Path(mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        self.complete = True
        self._trouble = trouble

    def open(self, restarts: int, rank: int) -> tuple[Sink, Sink]:
        """Open the log files for the standard output and standard error of a rank after `restarts` restarts."""
        folder = self.path / f"restart-{restarts}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._report(f"{folder} cannot be made ({error.strerror})")
        out, err = (self._open(folder / f"rank-{rank}.{name}") for name in ("out", "err"))
        return out, err

    def _open(self, path: Path) -> Sink:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            sink = Sink(-1, str(path), self._lost)
            sink.fail(error)
            return sink
        return Sink(fd, str(path), self._lost, closefd=True)

    def _lost(self, sink: Sink) -> None:
        self._report(f"{sink.trouble}: later output is missing from it")

    def _report(self, trouble: str) -> None:
        self.complete = False
        self._trouble(trouble)
