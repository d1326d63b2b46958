"""Background load: processes that each keep a core busy during a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy"]

#: Program of a busy process. It ends when its parent ends, in any way.
WORK = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""


@contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `count` cores busy during the block; yield the processes."""
    processes = [subprocess.Popen([sys.executable, "-c", WORK, str(os.getpid())]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
