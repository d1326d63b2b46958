"""A simulated machine that has torch but not CuPy.

``import torch`` imports a lookalike whose tensors are in memory of the fake device. ctypes loads a libcuda and a
libnccl in front of the fakes. So aiocoll finds the libraries as on a real machine. Only their work is simulated.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from aiocoll.elements.dtypes import by_name
from aiocoll.gpu.provider import by_ctypes
from aiocoll.testing.skips import _gpus

from ..fake_libraries import Torch
from ..fakes.cuda import FakeCuda
from ..fakes.nccl import FakeNccl
from ..reductions import DTYPES
from . import stub_cupy
from .fake_libraries import libcuda, libnccl
from .groups import join_threads


@contextmanager
def torch_machine(devices: int = 1, library: Callable[[FakeCuda], Any] = FakeNccl) -> Iterator[FakeCuda]:
    """Simulate the machine during a ``with`` block; yield its fake CUDA.

    Args:
        devices: the number of devices.
        library: class of the fake NCCL.
    """
    cuda = FakeCuda(devices)
    nccl = library(cuda)
    nccl.connects = True
    libraries = {"libcuda.so.1": libcuda(cuda), "libnccl.so.2": libnccl(cuda, nccl)}
    load, modules = ctypes.CDLL, {"torch": _Torch(cuda), "cupy": None, "nvidia.nccl": None}
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    with cuda:
        ctypes.CDLL = lambda name, *more, **modes: libraries.get(name) or load(name, *more, **modes)  # type: ignore
        sys.modules.update(modules)  # type: ignore[arg-type]
        _clear_caches()
        try:
            yield cuda
        finally:
            ctypes.CDLL = load
            for name in modules:
                del sys.modules[name]
            sys.modules.update(before)
            _clear_caches()
    join_threads()
    assert nccl.complaints == []
    assert nccl.crashes == []
    assert cuda.full == cuda.held_up == []


def _clear_caches() -> None:
    """Clear the caches of aiocoll's searches for modules and libraries."""
    stub_cupy.unload_cupy_api()
    by_ctypes.cache_clear()
    _gpus.cache_clear()


class _Stream:
    def __init__(self, address: int, device: int) -> None:
        self.cuda_stream, self.device_index = address, device


class _Torch(Torch):
    """A torch lookalike with the memory and streams of the fake device."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(lambda stream, device, work: cuda.kernel(stream, work, device), cuda.allocate)
        self._cuda = cuda
        for name in DTYPES:
            setattr(self, name, f"torch.{name}")
        self.cuda.is_available = lambda: True
        self.cuda.Stream = self._new_stream
        self.cuda.device = self._on_device
        self.cuda.Event = lambda: _Event(cuda, self.streams)
        self.cuda.set_stream = self._set_stream
        self.cuda.default_stream = lambda device: _Stream(0, device)
        self.cuda.ExternalStream = lambda address: _Stream(address, cuda.current())
        self.cuda.stream = lambda stream: self.on_stream(stream.cuda_stream, stream.device_index)

    def empty(self, shape: Any, *, dtype: str, device: Any) -> Any:
        name = dtype.removeprefix("torch.")
        ordinal = int(device.removeprefix("cuda:")) if isinstance(device, str) else device.index
        return self.Tensor(self.new(shape, by_name(name).storage, ordinal), name, ordinal)

    def as_tensor(self, memory: Any, device: str) -> _Bytes:
        """Return a tensor that shares the given memory of the thread's device."""
        assert device == "cuda"
        about = memory.__cuda_array_interface__
        assert about["typestr"] == "|u1"
        return _Bytes(about["data"][0], about["shape"][0])

    def mul(self, given: _Bytes, number: complex, out: _Bytes) -> None:
        """Enqueue a multiplication on the current stream of the thread's device."""
        cuda, stream = self._cuda, self.streams.get(self._cuda.current(), 0)
        count = given.nbytes // np.dtype(by_name(given.dtype).storage).itemsize
        cuda.kernels.scale(out.address, given.address, count, given.dtype, number, stream)

    def _new_stream(self, device: int) -> _Stream:
        with self._on_device(device):
            return _Stream(self._cuda.stream_create(), device)

    @contextmanager
    def _on_device(self, device: int) -> Iterator[None]:
        before = self._cuda.current()
        self._cuda.use(device)
        try:
            yield
        finally:
            self._cuda.use(before)

    def _set_stream(self, stream: _Stream) -> None:
        self.streams[stream.device_index] = stream.cuda_stream


class _Bytes:
    """A tensor lookalike: a block of device memory with a dtype."""

    def __init__(self, address: int, nbytes: int, dtype: str = "uint8") -> None:
        self.address, self.nbytes, self.dtype = address, nbytes, dtype

    def view(self, dtype: str) -> _Bytes:
        return _Bytes(self.address, self.nbytes, dtype.removeprefix("torch."))


class _Event:
    """A torch event lookalike on the thread's device."""

    def __init__(self, cuda: FakeCuda, streams: dict[int, int]) -> None:
        self._cuda, self._streams, self._event = cuda, streams, cuda.event_create()

    def record(self) -> None:
        self._cuda.event_record(self._event, self._streams.get(self._cuda.current(), 0))

    def query(self) -> bool:
        return self._cuda.event_done(self._event)

    def __del__(self) -> None:
        self._cuda.event_destroy(self._event)
