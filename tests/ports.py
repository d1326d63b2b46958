"""Ports that are free, and that the kernel gives to nobody who asks for any."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack

#: Below those that kernels give (from 32768 on Linux, from 49152 elsewhere): a port that is free now stays so.
_FIRST, _LAST = 15_000, 30_000


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nothing listens at `host`."""
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Return the first of `count` ports in a row on which nothing listens at `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        # Anywhere: tests that run at the same time must not look for one in the same place.
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
