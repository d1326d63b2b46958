"""Devices that the same tests run on: those of the fake, always, and real ones, with arrays of CuPy or of torch."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from aiocoll import BackendUnavailableError
from aiocoll.gpu.device import close_devices
from aiocoll.gpu.provider import by_ctypes, provide, runtime
from aiocoll.testing.skips import _gpus

from ...reductions import DTYPES, numpy_dtype
from ..adapted import ADAPTER
from ..groups import Gpus, gpus, host, join_threads

#: What arrays are made of.
KINDS = ("fake", "cupy", "torch")
#: Dtypes that CuPy has no arrays of.
NARROW = frozenset(name for name in DTYPES if not hasattr(np, name) and name != "bool")
#: Where figures are written, one JSON object a line.
FIGURES = "GPU_FIGURES"
#: Seconds after which a kernel that waits for its gate gives up: a test that fails must not hold the device for ever.
SHUT = 20.0
#: Waits for a flag in host memory, or so long; and adds a number. Both are compiled before anything may be held up.
SOURCE = r"""
extern "C" __global__ void until(volatile int* open, unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*open && now - start < nanoseconds);
}
extern "C" __global__ void add(double* values, double number, long long count) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) values[i] += number;
}
"""


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

    def poke(self, device: int) -> None:
        """Make calls of the runtime such as those of another thread of the user's."""
        raise NotImplementedError

    def figure(self, name: str, value: Any) -> None:
        """Write down what was measured."""
        figure(self.kind, name, value)


def figure(kind: str, name: str, value: Any) -> None:
    """Write down what was measured on devices of a kind."""
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            file.write(json.dumps({"world": kind, "name": name, "value": value}) + "\n")


class Fake(World):
    """The fake device, whose arrays look like torch's."""

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

    def poke(self, device: int) -> None:
        cuda = self.gpu.cuda
        cuda.use(device)
        event = cuda.event_create()
        cuda.event_record(event, 0)
        cuda.event_done(event)
        cuda.event_destroy(event)

    def current(self, device: int) -> int:
        return int(self.gpu.torch.streams.get(device, 0))


class _Flag(NamedTuple):
    """A number in page-locked memory, which a kernel looks at."""

    flags: NDArray[np.int32]
    place: int

    def open(self) -> None:
        self.flags[self.place] = 1


class _Address(NamedTuple):
    """A stream for CuPy, by the CUDA stream protocol."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


class Real(World):
    """Real devices. Memory is filled and read, and kernels are launched, by CuPy, whatever the arrays are."""

    slow = 1.0

    def __init__(self, kind: str) -> None:
        import cupy

        self.kind, self.cupy, self.cuda = kind, cupy, cupy.cuda.runtime
        self.library = importlib.import_module(kind)
        self.devices = int(self.cuda.getDeviceCount())
        if kind == "torch":
            self.dtypes = frozenset(name for name in DTYPES if hasattr(self.library, name))
        else:
            self.dtypes = frozenset(DTYPES) - NARROW
        module = cupy.RawModule(code=SOURCE)
        self._until, self._add = module.get_function("until"), module.get_function("add")
        memory = cupy.cuda.alloc_pinned_memory(64 * 4)
        self._memory, self._flags = memory, np.frombuffer(memory, np.int32, 64)
        self._flags[:] = 0
        self._streams: list[Any] = []  # CuPy gives up a stream that nobody keeps, even the current one
        self._places = cycle(range(1, 64))  # number 0 is never set
        for device in range(self.devices):
            self.delay(0.0, device)
            warm = self.tensor(np.zeros(1), device)
            self.add(warm, 1.0)
            assert self.host(warm).tolist() == [1]

    def tensor(self, values: Any, device: int = 0) -> Any:
        array = np.ascontiguousarray(values).reshape(-1)
        name = array.dtype.name
        if self.kind == "torch":
            made = self.library.empty((array.size,), dtype=getattr(self.library, name), device=f"cuda:{device}")
        else:
            with self.cupy.cuda.Device(device):
                made = self.library.empty((array.size,), name)
        if array.size:
            stream = self.current(device)
            with self.cupy.cuda.Device(device):
                self.cuda.memcpyAsync(
                    self._address(made), array.ctypes.data, array.nbytes, self.cuda.memcpyHostToDevice, stream
                )
                self.cuda.streamSynchronize(stream)
        return made

    def part(self, tensor: Any, start: int, stop: int) -> Any:
        return tensor[start:stop]

    def host(self, tensor: Any) -> NDArray[Any]:
        count = tensor.numel() if self.kind == "torch" else tensor.size
        device = self._device(tensor)
        made = np.empty(count, numpy_dtype(str(tensor.dtype).removeprefix("torch.")))
        with self.cupy.cuda.Device(device):
            stream = self.current(device)
            self.cuda.streamSynchronize(stream)
            if count:
                self.cuda.memcpyAsync(
                    made.ctypes.data, self._address(tensor), made.nbytes, self.cuda.memcpyDeviceToHost, stream
                )
                self.cuda.streamSynchronize(stream)
        return made

    def stream(self, device: int) -> Any:
        if self.kind == "torch":
            made = self.library.cuda.Stream(device=device)
            self.library.cuda.set_stream(made)
        else:
            with self.cupy.cuda.Device(device):
                made = self.cupy.cuda.Stream(non_blocking=True)
                made.use()
        self._streams.append(made)
        return made

    def default_stream(self, device: int, per_thread: bool) -> None:
        if self.kind == "torch":
            assert not per_thread, "torch makes no use of it"
            self.library.cuda.set_stream(self.library.cuda.default_stream(device))
        else:
            with self.cupy.cuda.Device(device):
                (self.cupy.cuda.Stream.ptds if per_thread else self.cupy.cuda.Stream.null).use()

    def add(self, tensor: Any, number: float) -> None:
        count = tensor.numel() if self.kind == "torch" else tensor.size
        with self._on(self._device(tensor)):
            arguments = (np.uint64(self._address(tensor)), np.float64(number), np.int64(count))
            self._add((64,), (256,), arguments)

    def delay(self, seconds: float, device: int) -> None:
        self._hold(0, seconds, device)

    def gate(self, device: int) -> Gate:
        place = next(self._places)
        self._flags[place] = 0
        self._hold(place, SHUT, device)
        return _Flag(self._flags, place)

    def poke(self, device: int) -> None:
        with self.cupy.cuda.Device(device):
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self.cupy.cuda.Stream.null)
            _ = event.done
        if self.kind == "torch":
            mark = self.library.cuda.Event()
            mark.record()
            mark.query()

    def _hold(self, place: int, seconds: float, device: int) -> None:
        with self._on(device):
            address = self._flags.ctypes.data + place * self._flags.itemsize
            self._until((1,), (1,), (np.uint64(address), np.uint64(seconds * 1e9)))

    def current(self, device: int) -> int:
        if self.kind == "torch":
            return int(self.library.cuda.current_stream(device).cuda_stream)
        return int(self.cupy.cuda.get_current_stream(device).ptr)

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        address, streams = self.current(device), self.cupy.cuda.Stream
        with self.cupy.cuda.Device(device), streams.from_external(_Address(address)) if address else streams.null:
            yield

    def _address(self, tensor: Any) -> int:
        return int(tensor.data_ptr() if self.kind == "torch" else tensor.data.ptr)

    def _device(self, tensor: Any) -> int:
        return int(tensor.get_device() if self.kind == "torch" else tensor.device.id)

    def leave(self) -> None:
        """Make the default streams current again, as they were."""
        for device in range(self.devices):
            with self.cupy.cuda.Device(device):
                self.cupy.cuda.Stream.null.use()
            if self.kind == "torch":
                self.default_stream(device, False)


def missing(kind: str) -> str | None:
    """Return why there are no such devices here."""
    if kind == "fake":
        return None
    if not _gpus():
        return "there is no CUDA device"
    for name in ("cupy", kind):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"needs {name}: {error}"
    try:
        runtime()
    except BackendUnavailableError as error:
        return str(error)
    if kind == "torch" and not importlib.import_module("torch").cuda.is_available():
        return "torch finds no CUDA device"
    return None


@contextmanager
def world(kind: str, way: str = "nccl", devices: int = 1, *, stuck: bool = False) -> Iterator[World]:
    """Provide devices: so many of the fake, or all real ones; and NCCL, if that is the way.

    Threads must have ended at the end, unless it is known that one is `stuck`: nothing but a fake can let it go.
    """
    if kind == "fake":
        with gpus(devices, way) as gpu:
            yield Fake(gpu, devices)
        return
    cuda, nccl = by_ctypes()[:2] if os.environ.get(ADAPTER) == "ctypes" else runtime()
    made = Real(kind)
    try:
        with provide(cuda, nccl if way == "nccl" else None, "NCCL is missing" if nccl is None else "it was left out"):
            yield made
    finally:
        made.leave()
        ended = close_devices(0.1 if stuck else 30.0)
        if not stuck:
            assert ended, "a thread of a device is stuck"
            join_threads()


def ranks(made: World, way: str, wanted: int) -> int:
    """Return how many ranks there can be: NCCL wants a device for each."""
    return min(wanted, made.devices) if way == "nccl" else wanted
