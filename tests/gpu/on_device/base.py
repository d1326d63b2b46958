"""The device interface of the on-device tests, and helpers that measure event loop delays."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aiocoll import ProcessGroup

#: The environment variable with the path of the measurement file, which gets one JSON object per line.
FIGURES = "GPU_FIGURES"
#: The sleep time in seconds of the task that measures event loop delays.
NAP = 0.001


class Gate(Protocol):
    """A kernel that blocks its stream until `open` is called."""

    def open(self) -> None: ...


class World:
    """The interface to a machine's devices and to one-dimensional arrays on them.

    Attributes:
        kind: the kind of devices and arrays; see `worlds.py`.
        devices: the number of devices.
        dtypes: names of the supported dtypes.
        slow: seconds that a long kernel takes; fewer on the fake.
    """

    kind: str
    devices: int
    dtypes: frozenset[str]
    slow: float

    def tensor(self, values: Any, device: int = 0) -> Any:
        """Return a new device array with the given values."""
        raise NotImplementedError

    def part(self, tensor: Any, start: int, stop: int) -> Any:
        """Return a view of the elements `start` to `stop` of a device array."""
        raise NotImplementedError

    def host(self, tensor: Any) -> NDArray[Any]:
        """Wait for the current stream of the array's device; return a host copy of the array."""
        raise NotImplementedError

    def stream(self, device: int) -> Any:
        """Create a stream, make it current on a device, and return it."""
        raise NotImplementedError

    def current(self, device: int) -> int:
        """Return the handle of the current stream of a device."""
        raise NotImplementedError

    def default_stream(self, device: int, per_thread: bool) -> None:
        """Make a device's default stream current: the legacy stream, or with `per_thread` the stream of this thread."""
        raise NotImplementedError

    def add(self, tensor: Any, number: float) -> None:
        """Enqueue a kernel on the current stream that adds a number to a float64 array."""
        raise NotImplementedError

    def delay(self, seconds: float, device: int) -> None:
        """Block later work on the current stream of a device for some seconds."""
        raise NotImplementedError

    def gate(self, device: int) -> Gate:
        """Block later work on the current stream of a device until the returned gate is opened."""
        raise NotImplementedError

    def capturing(self, device: int) -> AbstractContextManager[None]:
        """Capture the current stream of a device into a graph in a ``with`` block, in CUDA's default mode."""
        raise NotImplementedError

    def poke(self, device: int) -> None:
        """Make some CUDA runtime calls, as other threads of a program might."""
        raise NotImplementedError

    def figure(self, name: str, value: Any) -> None:
        """Record a measurement on these devices."""
        record_figure(self.kind, name, value)


@asynccontextmanager
async def late_wakeups() -> AsyncIterator[list[float]]:
    """Yield a list that records, in seconds, how late a sleeping task wakes up during the block."""
    late: list[float] = []

    async def nap() -> None:
        while True:
            start = perf_counter()
            await asyncio.sleep(NAP)
            late.append(perf_counter() - start - NAP)

    napping = asyncio.create_task(nap())
    await asyncio.sleep(0)
    try:
        yield late
    finally:
        napping.cancel()
        await asyncio.wait([napping])


def lag_percentiles(late: Sequence[float]) -> list[float]:
    """Return the median, the 99th percentile and the maximum of delays, converted from s to ms."""
    found: list[float] = (np.percentile(late, (50, 99, 100)) * 1e3).round(3).tolist()
    return found


async def reduced_and_gated(pg: ProcessGroup, made: World, value: float = 1.0) -> tuple[int, Any, Gate]:
    """Return this rank's device, a tensor after a first allreduce, and a closed gate on its current stream.

    The first call of a group creates its communicator or locks memory, for which CUDA may wait for the device. So this
    first call comes before the gate.
    """
    device = pg.rank() % made.devices
    tensor = made.tensor(np.full(1000, value), device)
    await pg.allreduce(tensor)
    return device, tensor, made.gate(device)


def record_figure(kind: str, name: str, value: Any) -> None:
    """Append a measurement to the file in the environment variable `FIGURES`, if the variable is set."""
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            file.write(json.dumps({"world": kind, "name": name, "value": value}) + "\n")
