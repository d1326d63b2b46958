"""The output of ranks in files, which only their user can read: it may have secrets in it.

A job has a folder of its own, named by the time and some letters, with a folder ``restart-K`` for each restart (0 is
the first start), with ``rank-R.out`` and ``rank-R.err`` for each rank that was started then.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

__all__ = ["LogFile", "Logs"]


class LogFile:
    """A file that gets what a rank writes, as it comes. If that fails, the job goes on without it.

    Args:
        path: of the file, which is created.
        trouble: called once with what to tell the user if the file cannot be written.
    """

    def __init__(self, path: Path, trouble: Callable[[str], object]) -> None:
        self._path = path
        self._trouble = trouble
        self._lock = threading.Lock()
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self._lost(error)

    def write(self, data: bytes) -> None:
        """Append `data`; nothing once the file is closed."""
        with self._lock:
            try:
                while data and self._fd >= 0:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:
                self._close()
                self._lost(error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lost(self, error: OSError) -> None:
        self._trouble(f"{self._path} cannot be written ({error.strerror}): it lacks what comes from now on")


class Logs:
    """The folder of a job.

    Args:
        parent: where the folder is made; made itself if it is not there.
        trouble: called with what to tell the user if a file cannot be written.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, parent: str, trouble: Callable[[str], object]) -> None:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        self.path = Path(mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        self._trouble = trouble

    def open(self, restarts: int, rank: int) -> tuple[LogFile, LogFile]:
        """Return files for standard output and standard error of a rank that starts after so many restarts."""
        folder = self.path / f"restart-{restarts}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._trouble(f"{folder} cannot be made ({error.strerror})")
        out, err = (LogFile(folder / f"rank-{rank}.{name}", self._trouble) for name in ("out", "err"))
        return out, err
