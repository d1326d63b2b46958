"""The fake device for the on-device tests; aiocoll calls it without an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from ...reductions import DTYPES
from ..groups import Gpus, host
from .base import Gate, World


class FakeWorld(World):
    """A machine with fake devices and arrays of a torch lookalike."""

    kind, dtypes, slow = "fake", frozenset(DTYPES), 0.3

    def __init__(self, gpu: Gpus, devices: int) -> None:
        self.gpu, self.devices = gpu, devices

    def tensor(self, values: Any, device: int = 0) -> Any:
        return self.gpu.tensor(values, device)

    def part(self, tensor: Any, start: int, stop: int) -> Any:
        values = tensor.values[start:stop]
        made = self.gpu.torch.Tensor(tensor.host[start:stop], tensor.dtype.removeprefix("torch."), tensor.get_device())
        made.values, made.around = values, tensor.around
        return made

    def host(self, tensor: Any) -> NDArray[Any]:
        device = tensor.get_device()
        self.gpu.cuda.stream_synchronize(self.current(device), device)
        return host(tensor).copy()

    def stream(self, device: int) -> Any:
        return self.gpu.stream(device)

    def default_stream(self, device: int, per_thread: bool) -> None:
        self.gpu.torch.streams[device] = 2 if per_thread else 0

    def add(self, tensor: Any, number: float) -> None:
        device, values = tensor.get_device(), tensor.values

        def work() -> None:
            values[...] += number

        self.gpu.cuda.kernel(self.current(device), work, device)

    def delay(self, seconds: float, device: int) -> None:
        self.gpu.cuda.kernel(self.current(device), lambda: None, device, seconds)

    def gate(self, device: int) -> Gate:
        return self.gpu.gate(device)

    @contextmanager
    def capturing(self, device: int) -> Iterator[None]:
        stream = self.current(device)
        self.gpu.cuda.capture(stream, True, device)
        try:
            yield
        finally:
            self.gpu.cuda.capture(stream, False, device)
        assert self.gpu.cuda.disturbed == []

    def poke(self, device: int) -> None:
        cuda = self.gpu.cuda
        cuda.use(device)
        event = cuda.event_create()
        cuda.event_record(event, 0)
        cuda.event_done(event)
        cuda.event_destroy(event)

    def current(self, device: int) -> int:
        return int(self.gpu.torch.streams.get(device, 0))
