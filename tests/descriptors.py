"""Limits of open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def descriptor_limit(more: int) -> Iterator[None]:
    """Limit this process to `more` further open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = os.dup(0)
    os.close(limit)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    # The limit is on descriptor numbers, and a new descriptor takes the lowest free number.
    while more:
        more -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
