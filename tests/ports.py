"""Free ports outside of the range from which the kernel assigns ports itself."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack

#: The kernel assigns ports from 32768 (Linux) or 49152 (elsewhere), so a free port below stays free.
_FIRST, _LAST = 15_000, 30_000


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nothing listens at `host`."""
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Return the first of `count` consecutive ports on which nothing listens at `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        # Start at a random port, since tests that run at the same time must not choose the same ports.
        first = _FIRST + int.from_bytes(os.urandom(4)) % (_LAST - _FIRST - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket(family)).bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return first
