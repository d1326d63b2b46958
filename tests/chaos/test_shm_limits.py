"""Processes whose limits prevent shared memory: they use sockets, warn once, and are not killed by a signal."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, resource, sys
import numpy as np
from aiocoll import GroupOptions
from aiocoll.group.parts import parts_of
from aiocoll.testing import run_ranks

async def rank(pg):
    for count in (1, 1000, 100_000):
        tensor = np.full(count, 1.0 + pg.rank())
        await pg.allreduce(tensor)
        assert (tensor == 3).all()
    await pg.barrier()
    return sorted({channel.link.carrier for channel in parts_of(pg).comm.channels if channel.link is not None})

async def main():
    # Meet once before the limit is set: the first rendezvous takes resources that the process never returns.
    await run_ranks(2, rank, options=GroupOptions(transport="unix"))
    what, more = getattr(resource, sys.argv[1]), int(sys.argv[2])
    if what == resource.RLIMIT_AS:
        with open("/proc/self/statm") as sizes:
            more += int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(what, (more, more))
    print(*(await run_ranks(2, rank, options=GroupOptions(transport="shm"))))

asyncio.run(main())
"""


def carriers_and_log(limit: str, value: int) -> tuple[str, list[str]]:
    """Run the program with a resource limit; return the media of both ranks' links, and the lines of the log."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, limit, str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip(), done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("RLIMIT_FSIZE", 0, "File too large"),
        ("RLIMIT_FSIZE", 64 * 1024, "File too large"),
        ("RLIMIT_AS", 6 * 1024 * 1024, "Cannot allocate memory"),
    ],
)
def test_ranks_with_a_memory_limit_use_sockets(limit: str, value: int, reason: str) -> None:
    carriers, log = carriers_and_log(limit, value)
    assert carriers == "['unix'] ['unix']"
    warnings = [line for line in log if "uses unix sockets instead of shared memory" in line]
    assert 1 <= len(warnings) <= 2
    assert all(reason in line for line in warnings)
    assert log == warnings


def test_ranks_without_a_memory_limit_use_shared_memory() -> None:
    assert carriers_and_log("RLIMIT_FSIZE", 1 << 30) == ("['shm'] ['shm']", [])
