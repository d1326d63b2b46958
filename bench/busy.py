"""Other work on the machine: processes that each keep a core busy while a benchmark runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy"]

#: Ends with the process that has started it, too, however that one ends.
WORK = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


@contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `count` cores busy, by the processes that it yields."""
    processes = [subprocess.Popen([sys.executable, "-c", WORK, str(os.getpid())]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
