"""A rank of loop_lag.py, which measures how long each callback blocks the event loop during allreduces.

First every callback of the loop is timed, on the CPU clock of this thread and on the wall clock. Further allreduces run
next to a task that repeatedly sleeps for a millisecond and records how late it wakes: the delay that other tasks of a
program would see. These are separate so that the short callbacks of the task are not among the timed ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import uvloop

from aiocoll import GroupOptions, new_group

#: Seconds of a sleep: the timer granularity of asyncio's loop and of uvloop.
NAP = 0.001


class Timed:
    """An event loop mixin that times callbacks while `samples` is a list."""

    samples: list[tuple[float, float]] | None = None

    def _timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        if getattr(callback, "timed", False):  # wrapped already: asyncio's call_later calls call_at
            return callback

        def run(*args: Any) -> None:
            cpu, wall = thread_time(), perf_counter()
            callback(*args)
            if self.samples is not None:
                self.samples.append((thread_time() - cpu, perf_counter() - wall))

        run.timed = True
        return run

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._timed(callback), *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_later(delay, self._timed(callback), *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._timed(callback), *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        return super().add_reader(fd, self._timed(callback), *args)

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> Any:
        return super().add_writer(fd, self._timed(callback), *args)


class TimedAsyncio(Timed, asyncio.SelectorEventLoop):
    pass


class TimedUvloop(Timed, uvloop.Loop):
    pass


async def naps(late: list[float]) -> None:
    while True:
        start = perf_counter()
        await asyncio.sleep(NAP)
        late.append(perf_counter() - start - NAP)


async def measure(config: dict[str, Any]) -> dict[str, Any]:
    loop: Any = asyncio.get_running_loop()
    late: list[float] = []
    async with new_group(
        init_method=f"file://{os.getcwd()}/store",
        rank=config["rank"],
        world_size=config["world_size"],
        options=GroupOptions(transport=config["transport"], job_key=config["job_key"]),
    ) as pg:
        x = np.ones(config["nbytes"] // 4, np.float32)
        await pg.allreduce(x)  # opens the links
        await asyncio.sleep(0)  # ends the current callback before timing starts
        samples: list[tuple[float, float]] = []
        loop.samples = samples
        start = perf_counter()
        for _ in range(config["iterations"]):
            await pg.allreduce(x)
        took = perf_counter() - start
        loop.samples = None
        napping = asyncio.create_task(naps(late))
        for _ in range(config["iterations"]):
            await pg.allreduce(x)
        napping.cancel()
        assert (x == float(config["world_size"]) ** (2 * config["iterations"] + 1)).all(), "a sum is wrong"
    cpu, wall = zip(*samples, strict=True)
    return {"cpu": cpu, "wall": wall, "late": late, "seconds": took / config["iterations"]}


def main() -> None:
    config = json.loads(sys.argv[1])
    loop = TimedUvloop if config["loop"] == "uvloop" else TimedAsyncio
    with asyncio.Runner(loop_factory=loop) as runner:
        json.dump(runner.run(measure(config)), sys.stdout)


if __name__ == "__main__":
    main()
