"""Functions that the ranks of `test_processes` run, in a module that their processes can import."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from aiocoll import ProcessGroup, current_process_group, new_group


async def describe_rank(pg: ProcessGroup, *args: Any) -> dict[str, Any]:
    assert current_process_group() is pg
    async with new_group() as second:
        total = await second.allreduce(pg.rank())
    return {
        "rank": pg.rank(),
        "size": pg.size(),
        "args": args,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "total": total,
        "variables": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "AIOCOLL_JOB_KEY")},
    }


class OwnLoop(asyncio.SelectorEventLoop):
    """A loop class that another process can import."""


class NeedyLoop(asyncio.SelectorEventLoop):
    """A loop class that another process cannot instantiate, since it needs an argument."""

    def __init__(self, number: int) -> None:
        super().__init__()


async def forget(pg: ProcessGroup) -> int:
    """Make a failing call and never await it."""
    pg.allreduce(np.ones(3 + pg.rank()))
    return pg.rank()


class Sealed(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("sealed")


async def fail(pg: ProcessGroup, how: str) -> Any:
    """Let rank 1 fail while the other ranks wait for it."""
    if pg.rank() == 1:
        match how:
            case "raise":
                raise KeyError("lost")
            case "sealed":
                raise Sealed("no way")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                faulty(ctypes)
            case "exit":
                os._exit(7)
            case "quit":
                sys.exit(7)
    await pg.barrier()
    return (lambda: None) if how == "return" else None


def faulty(library: Any) -> None:
    library.string_at(0)


async def hang(pg: ProcessGroup, path: str) -> None:
    """Block forever in a different way on each rank, after writing rank and pid to a file.

    Rank 3 waits to be stopped by the test.
    """

    def record_start() -> None:
        with open(path, "a") as file:
            file.write(f"{pg.rank()} {os.getpid()}\n")

    match pg.rank():
        case 0:
            threading.Thread(target=wait_for_nothing, name="helper", daemon=True).start()
            asyncio.get_running_loop().call_soon(record_start)  # called when this rank waits
            await pg.barrier()
        case 1:
            record_start()
            while True:  # the loop is blocked
                pass
        case 2:
            record_start()
            ctypes.PyDLL(None).pause()  # the call holds the GIL, so that all threads are blocked
        case 3:
            record_start()
            await asyncio.Event().wait()


def wait_for_nothing() -> None:
    threading.Event().wait()


async def leave_a_child(pg: ProcessGroup, path: str) -> None:
    """Start a child that waits forever, write its pid to a file, and wait."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])  # noqa: ASYNC220
    with open(path, "a") as file:  # noqa: ASYNC230
        file.write(f"{os.getpid()} {child.pid}\n")
    await asyncio.Event().wait()
