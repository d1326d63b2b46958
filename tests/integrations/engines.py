"""Programs that drive an engine: a test starts one, and has it call functions of its own, by name.

An engine keeps threads and files of a process for itself, so it does not run in that of the tests.
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

__all__ = ["Driver", "held", "hello", "left_behind", "serve", "until"]

ROOT = Path(__file__).parents[2]
#: Seconds that anything may take.
LIMIT = 60.0


class Driver:
    """A process that has started an engine."""

    def __init__(self, module: str, **environ: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCOLL_", "PYTHONASYNCIO"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=ROOT, env=kept | {"PYTHONPATH": str(ROOT)} | environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def call(self, name: str, **arguments: Any) -> Any:
        """Have it call a function; return the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        result, error = json.loads(line)
        assert error is None, error
        return result

    def close(self) -> None:
        """End it, and the engine with it."""
        self._process.communicate(timeout=LIMIT)
        assert self._process.returncode == 0


async def serve(functions: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """Call functions as a `Driver` asks for them; nothing else is said on standard output."""
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


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something in another process, of which nothing tells."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


def held() -> set[str]:
    """Return the threads of aiocoll in this process, its shared memory, and what listens here."""
    threads = {f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("aiocoll")}
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed the others
            files.add(os.readlink(f"/proc/self/fd/{fd}"))
    return threads | (files & _listening()) | {each for each in files if "memfd:aiocoll" in each}


def _listening() -> set[str]:
    """Return the sockets of this host that listen; the engine's own connections come and go."""
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    unix = [row.split() for row in Path("/proc/self/net/unix").read_text().splitlines()[1:]]
    listening = {row[9] for row in rows if row[3] == "0A"} | {row[6] for row in unix if row[3] == "00010000"}
    return {f"socket:[{inode}]" for inode in listening}


@contextmanager
def left_behind(found: list[str]) -> Iterator[None]:
    """Add to `found` what this process has kept of the block."""
    before = held()
    yield
    found += held() - before


def hello() -> str:
    """Return the program of the README, without the line that runs it."""
    from tests.pages import code

    return code("README.md", "Twelve lines").replace("asyncio.run(main())\n", "")
