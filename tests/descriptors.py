"""A limit on the open files of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def descriptor_limit(more: int) -> Iterator[None]:
    """Let this process open at most `more` additional files inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = os.dup(0)
    os.close(limit)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    # RLIMIT_NOFILE limits descriptor numbers rather than their count. A new descriptor takes the lowest free number.
    while more:
        more -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
