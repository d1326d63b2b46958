"""What tests need of devices, whatever their arrays are of."""

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

#: Where figures are written, one JSON object a line.
FIGURES = "GPU_FIGURES"
#: Seconds that a task sleeps, again and again, to see how late it wakes.
NAP = 0.001


class Gate(Protocol):
    """A kernel that runs until it is opened."""

    def open(self) -> None: ...


class World:
    """Devices, and arrays on them. All arrays have one dimension.

    Attributes:
        kind: what arrays are made of.
        devices: how many there are.
        dtypes: of which there are arrays.
        slow: seconds that a long kernel takes: on the fake, where time is real as well, fewer.
    """

    kind: str
    devices: int
    dtypes: frozenset[str]
    slow: float

    def tensor(self, values: Any, device: int = 0) -> Any:
        """Return an array that has these values now."""
        raise NotImplementedError

    def part(self, tensor: Any, start: int, stop: int) -> Any:
        """Return consecutive elements, which share the memory."""
        raise NotImplementedError

    def host(self, tensor: Any) -> NDArray[Any]:
        """Return a copy of what is there when the current stream of the device has done all that is on it now."""
        raise NotImplementedError

    def stream(self, device: int) -> Any:
        """Make a new stream current on a device, and return it."""
        raise NotImplementedError

    def current(self, device: int) -> int:
        """Return the current stream of a device."""
        raise NotImplementedError

    def default_stream(self, device: int, per_thread: bool) -> None:
        """Make the default stream of the device, or that of the calling thread, current on it."""
        raise NotImplementedError

    def add(self, tensor: Any, number: float) -> None:
        """Add to float64s, in the order of the current stream."""
        raise NotImplementedError

    def delay(self, seconds: float, device: int) -> None:
        """Let what comes on the current stream of a device begin so much later."""
        raise NotImplementedError

    def gate(self, device: int) -> Gate:
        """Let nothing begin that comes on the current stream of a device until the gate is opened."""
        raise NotImplementedError

    def capturing(self, device: int) -> AbstractContextManager[None]:
        """Capture what comes on the current stream of a device into a graph, in this block, in CUDA's default mode."""
        raise NotImplementedError

    def poke(self, device: int) -> None:
        """Make calls of the runtime such as those of another thread of the user's."""
        raise NotImplementedError

    def figure(self, name: str, value: Any) -> None:
        """Write down what was measured."""
        figure(self.kind, name, value)


@asynccontextmanager
async def naps() -> AsyncIterator[list[float]]:
    """Yield the seconds by which a task has woken late, while this block lasts."""
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


def lag(late: Sequence[float]) -> list[float]:
    """Return the median of these seconds, their 99th percentile and the most, in ms."""
    found: list[float] = (np.percentile(late, (50, 99, 100)) * 1e3).round(3).tolist()
    return found


async def held(pg: ProcessGroup, made: World, value: float = 1.0) -> tuple[int, Any, Gate]:
    """Return this rank's device, a tensor there that was reduced, and a gate behind which all waits that comes now.

    The first call of a group makes its communicator, or takes the memory that a staged call needs, for which CUDA may
    wait for the device.
    """
    device = pg.rank() % made.devices
    tensor = made.tensor(np.full(1000, value), device)
    await pg.allreduce(tensor)
    return device, tensor, made.gate(device)


def figure(kind: str, name: str, value: Any) -> None:
    """Write down what was measured on devices of a kind."""
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            file.write(json.dumps({"world": kind, "name": name, "value": value}) + "\n")
