"""Driver processes for tests: each starts an engine (Ray or Dask), and calls functions by name on request.

An engine keeps threads and files for the life of its process, so it does not run in the process of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["Driver", "held_resources", "hello_program", "record_leftovers", "serve", "wait_until"]

ROOT = Path(__file__).parents[2]
#: The timeout in seconds of each function call in a driver process, and of the end of the process.
LIMIT = 60.0


class Driver:
    """A handle for a driver process that has started an engine (Ray or Dask)."""

    def __init__(self, module: str, **environ: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCOLL_", "PYTHONASYNCIO"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, env=kept | {"PYTHONPATH": str(ROOT)} | environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def call(self, name: str, **arguments: Any) -> Any:
        """Let the driver process call one of its functions by name, and return the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        result, error = json.loads(line)
        assert error is None, error
        return result

    def close(self) -> None:
        """End the driver process, and with it Ray or Dask."""
        self._process.communicate(timeout=LIMIT)
        assert self._process.returncode == 0


async def serve(functions: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """Call functions as a `Driver` requests on standard input; write the results to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments = json.loads(line)
        try:
            async with asyncio.timeout(LIMIT):
                answer = await functions[name](**arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` is true, since no event reports changes in another process."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


def held_resources() -> set[str]:
    """Return the aiocoll threads, the aiocoll shared memory and the listening sockets of this process."""
    threads = {f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("aiocoll")}
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the directory listing itself is already closed
            files.add(os.readlink(f"/proc/self/fd/{fd}"))
    return threads | (files & _listening()) | {each for each in files if "memfd:aiocoll" in each}


def _listening() -> set[str]:
    """Return the listening sockets of this host, without connected ones, which Ray and Dask open at any time."""
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    unix = [row.split() for row in Path("/proc/self/net/unix").read_text().splitlines()[1:]]
    listening = {row[9] for row in rows if row[3] == "0A"} | {row[6] for row in unix if row[3] == "00010000"}
    return {f"socket:[{inode}]" for inode in listening}


@contextmanager
def record_leftovers(found: list[str]) -> Iterator[None]:
    """Append to `found` the aiocoll resources that this process has after the block, but not before it."""
    before = held_resources()
    yield
    found += held_resources() - before


def hello_program() -> str:
    """Return the program of the section "Twelve lines" in the README, without `asyncio.run(main())`."""
    from tests.pages import code

    return code("README.md", "Twelve lines").replace("asyncio.run(main())\n", "")
