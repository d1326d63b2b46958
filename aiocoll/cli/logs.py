"""The output of ranks in files, which only their user can read: it may have secrets in it.

A job has a folder of its own, named by the time and some letters, with a folder ``restart-K`` for each restart (0 is
the first start), with ``rank-R.out`` and ``rank-R.err`` for each rank that was started then.
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
    """The folder of a job.

    Args:
        parent: where the folder is made; made itself if it is not there.
        trouble: called, from any thread, with what to tell the user if a file cannot be written; the job goes on.

    Attributes:
        path: the folder.
        complete: whether all files have all output.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, parent: str, trouble: Callable[[str], object]) -> None:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        self.path = Path(mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        self.complete = True
        self._trouble = trouble

    def open(self, restarts: int, rank: int) -> tuple[Sink, Sink]:
        """Return files for standard output and standard error of a rank that starts after so many restarts."""
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
        self._report(f"{sink.trouble}: it lacks what comes from now on")

    def _report(self, trouble: str) -> None:
        self.complete = False
        self._trouble(trouble)
