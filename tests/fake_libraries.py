"""Fake CuPy and torch modules with CUDA, and a fake JAX array, which refuse the same calls as the real ones.

Put a module into `sys.modules`. Its device work is done at once, or by `enqueue(stream, device, work)`. New memory is
host memory, or comes from `allocate(nbytes, device)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

Enqueue = Callable[[int, int, Callable[[], None]], None]
Allocate = Callable[[int, int], np.ndarray]


def run_at_once(stream: int, device: int, work: Callable[[], None]) -> None:
    work()


def host_memory(nbytes: int, device: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class Module:
    """Common base of the fake CuPy and torch modules: current device, current streams, and the enqueued work."""

    def __init__(self, enqueue: Enqueue = run_at_once, allocate: Allocate = host_memory) -> None:
        self._enqueue, self._allocate = enqueue, allocate
        self.current = 0
        self.streams: dict[int, int] = {}
        #: All enqueued device work, as tuples (operation, device, stream).
        self.enqueued: list[tuple[str, int, int]] = []

    def new(self, shape: tuple[int, ...], dtype: Any, device: int) -> np.ndarray:
        """Return a new array in the memory of a device, filled with the byte 77."""
        kind = np.dtype(dtype)
        made = self._allocate(math.prod(shape) * kind.itemsize, device)
        made[:] = 77
        return made.view(kind).reshape(shape)

    def put(self, what: str, device: int, work: Callable[[], None]) -> None:
        self.enqueued.append((what, device, self.streams.get(device, 0)))
        self._enqueue(self.streams.get(device, 0), device, work)

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def on_stream(self, stream: int, device: int) -> Iterator[None]:
        before, self.streams[device] = self.streams.get(device, 0), stream
        try:
            yield
        finally:
            self.streams[device] = before


class JaxArray:
    """A fake JAX 0.10 array on the CPU: read-only, and without buffer and DLPack for dtypes of ml_dtypes."""

    def __init__(self, source: Any) -> None:
        self.host = np.array(source)
        self.host.flags.writeable = False
        self.dtype, self.shape = self.host.dtype, self.host.shape
        self._foreign = self.dtype.type.__module__ == "ml_dtypes"

    def __buffer__(self, flags: int) -> memoryview:  # Python 3.12 calls this method
        if self._foreign:
            raise BufferError(
                f"INVALID_ARGUMENT: Buffers of type {self.dtype} are not supported by the buffer protocol."
            )
        return memoryview(self.host)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> object:
        if self._foreign:
            raise RuntimeError(f"UNIMPLEMENTED: XLA type {self.dtype} has no DLPack equivalent")
        return self.host.__dlpack__(**options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.host

    def __array_namespace__(self) -> SimpleNamespace:
        return SimpleNamespace(asarray=JaxArray)


def _unreadable(*args: object, **kwargs: object) -> Any:
    raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")


class Cupy(Module):
    """A fake of the module `cupy`, version 14."""

    def __init__(self, enqueue: Enqueue = run_at_once, allocate: Allocate = host_memory) -> None:
        super().__init__(enqueue, allocate)
        outer = self

        class Device:
            def __init__(self, device: int) -> None:
                self.id = device
                self._blocks: list[Any] = []

            def __enter__(self) -> Device:
                self._blocks.append(outer.on_device(self.id))
                self._blocks[-1].__enter__()
                return self

            def __exit__(self, *exc: Any) -> None:
                self._blocks.pop().__exit__(*exc)

        class Stream:
            def __init__(self, ptr: int) -> None:
                self.ptr = ptr

            @classmethod
            def from_external(cls, other: Any) -> Stream:
                version, ptr = other.__cuda_stream__()
                assert version == 0
                return cls(ptr)

            def __enter__(self) -> Stream:
                self._block = outer.on_stream(self.ptr, outer.current)
                self._block.__enter__()
                return self

            def __exit__(self, *exc: Any) -> None:
                self._block.__exit__(*exc)

        class ndarray:
            """A fake CuPy array: the NumPy array `host` stands for memory of the CUDA device `device`."""

            __module__ = "cupy"

            __array__ = _unreadable

            def __init__(self, host: np.ndarray, device: int = 0) -> None:
                self.host = host
                self.device = Device(device)
                self.shape, self.strides, self.size = host.shape, host.strides, host.size
                self.dtype, self.nbytes = host.dtype, host.nbytes
                self.data = SimpleNamespace(ptr=host.__array_interface__["data"][0] if host.size else 0)
                self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous, f_contiguous=host.flags.f_contiguous)

            @property
            def __cuda_array_interface__(self) -> dict[str, Any]:
                raise AssertionError(
                    "a CuPy array was read through the CUDA array interface, which synchronizes with the stream"
                )

            def __setitem__(self, where: object, other: ndarray) -> None:
                assert where is Ellipsis
                assert self.device.id == other.device.id == outer.current, "Array device must be the current device"
                outer.put("copy", outer.current, lambda: np.copyto(self.host, other.host.reshape(self.shape)))

            def get(self) -> np.ndarray:
                return self.host.copy()

        self.ndarray = ndarray
        self.cuda = SimpleNamespace(Device=Device, Stream=Stream, get_current_stream=self._stream)

    def _stream(self, device_id: int = -1) -> Any:
        return self.cuda.Stream(self.streams.get(self.current if device_id < 0 else device_id, 0))

    def ascontiguousarray(self, array: Any) -> Any:
        assert array.device.id == self.current, "Array device must be the current device"
        dense = self.ndarray(self.new(array.shape, array.dtype, self.current), self.current)
        self.put("dense", self.current, lambda: np.copyto(dense.host, array.host))
        return dense

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self.ndarray(self.new(shape, dtype, self.current), self.current)

    def from_dlpack(self, other: Any) -> Any:
        return self.ndarray(np.from_dlpack(other), self.current)


class Torch(Module):
    """A fake of the module `torch`, version 2."""

    strided, sparse_coo = "torch.strided", "torch.sparse_coo"

    def __init__(self, enqueue: Enqueue = run_at_once, allocate: Allocate = host_memory) -> None:
        super().__init__(enqueue, allocate)
        outer = self

        class Tensor:
            """A fake torch tensor: the NumPy array `host` stands for memory of the CUDA device `device`."""

            __module__ = "torch"

            is_cpu = False
            __array__ = _unreadable

            def __init__(self, host: np.ndarray, dtype: str, device: int = 0, **more: Any) -> None:
                self.host = host
                self._ptr = int(host.__array_interface__["data"][0]) if host.size else 0
                self.dtype = f"torch.{dtype}"
                self.shape = host.shape
                self.layout = more.get("layout", Torch.strided)
                self.requires_grad = more.get("requires_grad", False)
                self._conj = more.get("conj", False)
                self.device = SimpleNamespace(type="cuda", index=device)

            @property
            def __cuda_array_interface__(self) -> dict[str, Any]:
                raise AssertionError("a tensor was read through the CUDA array interface, which has no bfloat16")

            def numpy(self) -> Any:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

            def _like(self, host: np.ndarray, **more: Any) -> Tensor:
                assert not self.requires_grad, "autograd would record this operation"
                return Tensor(host, self.dtype[6:], self.device.index, **more)

            def __getitem__(self, part: slice) -> Tensor:
                return self._like(self.host[part])

            def get_device(self) -> int:
                return int(self.device.index)

            def detach(self) -> Tensor:
                return Tensor(self.host, self.dtype[6:], self.device.index, conj=self._conj)

            def resolve_conj(self) -> Tensor:
                if not self._conj:
                    return self
                made = self._like(outer.new(self.shape, self.host.dtype, self.get_device()))
                outer.put("conj", self.get_device(), lambda: np.copyto(made.host, self.host.conj()))
                return made

            def resolve_neg(self) -> Tensor:
                return self

            def contiguous(self) -> Tensor:
                if self.host.flags.c_contiguous:
                    return self
                made = self._like(outer.new(self.shape, self.host.dtype, self.get_device()))
                outer.put("dense", self.get_device(), lambda: np.copyto(made.host, self.host))
                return made

            def data_ptr(self) -> int:
                return self._ptr

            def numel(self) -> int:
                return int(self.host.size)

            def stride(self) -> tuple[int, ...]:
                return tuple(each // self.host.itemsize for each in self.host.strides)

            def copy_(self, other: Tensor) -> Tensor:
                assert not self.requires_grad, (
                    "a leaf Variable that requires grad is being used in an in-place operation"
                )
                host = other.host.conj() if self._conj else other.host
                outer.put("copy", self.get_device(), lambda: np.copyto(self.host, host))
                return self

        class ExternalStream:
            def __init__(self, stream_ptr: int, device: Any) -> None:
                assert stream_ptr, "torch makes a new stream of pointer 0"
                self.cuda_stream, self.device = stream_ptr, device

        self.Tensor = Tensor
        self.cuda = SimpleNamespace(
            current_stream=lambda device: SimpleNamespace(cuda_stream=self.streams.get(device, 0)),
            default_stream=lambda device: SimpleNamespace(cuda_stream=0, device=device),
            ExternalStream=ExternalStream,
            stream=lambda stream: self.on_stream(stream.cuda_stream, stream.device.index),
        )
        self.version = SimpleNamespace(cuda="12.8")

    def empty(self, shape: Any, *, dtype: str, device: Any) -> Any:
        name = dtype.removeprefix("torch.")
        kind = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}.get(name, name)
        return self.Tensor(self.new(shape, kind, device.index), name, device.index)

    def from_dlpack(self, other: Any) -> Any:
        host = np.from_dlpack(other)
        return self.Tensor(host, host.dtype.name, self.current)
