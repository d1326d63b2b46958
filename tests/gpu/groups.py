"""What tests of groups on fake devices share: CUDA, NCCL, a module that looks like torch, and tensors of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll import ProcessGroup
from aiocoll.elements.dtypes import by_name
from aiocoll.gpu.device import Device, close_devices
from aiocoll.gpu.events import Events
from aiocoll.gpu.provider import provide, runtime

from ..fakes.cuda import FakeCuda, Gate
from ..fakes.nccl import FakeNccl
from ..internals import dispatcher_of
from ..lookalikes import Torch
from ..ranks import until
from .adapted import adapted

#: How CUDA arrays go: by NCCL, or through the host.
WAYS = ("nccl", "staged")


class Gpus:
    """One device for each rank, all in this process.

    Attributes:
        cuda: the fake runtime.
        nccl: the fake library.
        torch: what tensors are made of.
    """

    def __init__(self, cuda: FakeCuda, library: Callable[[FakeCuda], Any]) -> None:
        self.cuda = cuda
        self.nccl = library(cuda)
        self.nccl.connects = True
        self.torch = Torch(lambda stream, device, work: cuda.kernel(stream, work, device))

    def tensor(self, values: Any, device: int, dtype: str | None = None, margin: int = 0) -> Any:
        """Return a tensor on a device, with `margin` ones around it; of what NumPy lacks, `values` are ml_dtypes'."""
        array = np.asarray(values, dtype)
        around = self.cuda.allocate((array.size + 2 * margin) * array.itemsize, device).view(array.dtype)
        around[:] = 1
        inner = around[margin : margin + array.size].reshape(array.shape)
        inner[...] = array
        tensor = self.torch.Tensor(inner.view(by_name(array.dtype.name).storage), array.dtype.name, device)
        tensor.values, tensor.around = inner, around
        return tensor

    def stream(self, device: int) -> int:
        """Make a new stream current on a device, and return it."""
        stream = Events(self.cuda, device).on_device(self.cuda.stream_create)
        self.torch.streams[device] = stream
        return stream

    def gate(self, device: int) -> Gate:
        """Let nothing end that comes on the current stream of a device until the gate is opened."""
        return self.cuda.gate(self.torch.streams.get(device, 0), device)

    def calls(self) -> list[str]:
        """Return the names of all calls of NCCL from now on, on all ranks."""
        called: list[str] = []
        self.nccl.hooks.append(called.append)
        return called

    def engine(self, device: int) -> Device:
        """Return what the groups share."""
        return Device.of(runtime()[0], device)


@contextmanager
def gpus(devices: int, way: str = "nccl", library: Callable[[FakeCuda], Any] = FakeNccl) -> Iterator[Gpus]:
    """Provide so many devices, and NCCL, played by `library`, if that is the way."""
    before = sys.modules.get("torch")
    cuda = FakeCuda(devices)
    made = Gpus(cuda, library)
    sys.modules["torch"] = made.torch  # type: ignore[assignment]
    try:
        used, nccl = adapted(cuda, made.nccl)
        with cuda, provide(used, nccl if way == "nccl" else None):
            yield made
    finally:
        if before is None:
            del sys.modules["torch"]
        else:
            sys.modules["torch"] = before
        assert close_devices(10.0), "a thread of a device is stuck"
        join_threads()
    assert made.nccl.complaints == []
    assert made.nccl.crashes == []
    assert made.cuda.full == made.cuda.held_up == []


def join_threads() -> None:
    """Wait for threads of devices that a test has left stuck, and that have been let go."""
    for thread in threading.enumerate():
        if thread.name.startswith(("aiocoll-launch", "aiocoll-wait", "aiocoll-call")):
            thread.join(10.0)


def host(tensor: Any) -> NDArray[Any]:
    """Return what is in the tensor at this moment."""
    values: NDArray[Any] = tensor.values
    return values


async def launcher_rests(pg: ProcessGroup, gpu: Gpus) -> None:
    """Wait until the launcher is done with calls whose ends it has told: until then, calls go through its thread."""
    device = gpu.engine(pg.rank())
    await until(lambda: not device.is_launching)


async def looped(pg: ProcessGroup, gpu: Gpus, passes: int = 2, count: int = 3) -> Any:
    """Call the same a few times: from then on it goes ahead."""
    tensor = gpu.tensor(np.ones(count), pg.rank())
    for number in range(1, passes + 1):
        assert await pg.allreduce(tensor) is tensor
        assert host(tensor).tolist() == [float(pg.size() ** number)] * count
    tensor.values[:] = 1
    await launcher_rests(pg, gpu)
    return tensor


def is_native(pg: ProcessGroup) -> bool:
    """Whether the group has a communicator of NCCL."""
    return (
        dispatcher_of(pg).device_calls is not None
        and dispatcher_of(pg).device_calls.state.communicator is not None
        and dispatcher_of(pg).device_calls.state.communicator.is_begun
    )
