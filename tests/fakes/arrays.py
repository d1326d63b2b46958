"""Fake device arrays: NumPy-like arrays in the memory of a fake CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, by_name, from_numpy

from .cuda import FakeCuda

#: The byte that overwrites freed memory.
FREED = 0xDD


class FakeArray:
    """A C-contiguous array on a fake device, with `__cuda_array_interface__`.

    Its memory is freed with its last reference, even if the device still uses it.

    Args:
        cuda: the fake CUDA that has the device.
        values: initial values; for bfloat16 and float8, their bits as unsigned integers.
        device: ordinal of the device.
        dtype: dtype or its name; needed for dtypes that NumPy lacks, such as bfloat16 and float8.
        stream: the stream in `__cuda_array_interface__`; None leaves it out.

    Attributes:
        ptr: the address on the device.
    """

    def __init__(
        self, cuda: FakeCuda, values: Any, device: int = 0, dtype: DType | str | None = None, stream: int | None = None
    ) -> None:
        array = np.array(values, order="C")
        self.dtype = by_name(dtype) if isinstance(dtype, str) else dtype or from_numpy(array.dtype)
        if array.dtype != self.dtype.storage:
            raise TypeError(f"{self.dtype.name} is stored as {self.dtype.storage}, not as {array.dtype}")
        self.shape = array.shape
        self.size = array.size
        self.nbytes = array.nbytes
        self.device = device
        self.stream = stream
        self._cuda = cuda
        self._bytes = cuda.allocate(self.nbytes, device)
        self._bytes[:] = array.reshape(-1).view(np.uint8)
        self.ptr = self._bytes.ctypes.data if self.nbytes else 0

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):
            self._bytes.fill(FREED)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        native = self.dtype.name == self.dtype.storage.name
        found = {
            "shape": self.shape,
            "typestr": self.dtype.storage.str if native else f"<V{self.dtype.itemsize}",
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
        }
        return found if self.stream is None else found | {"stream": self.stream}

    def numpy(self, stream: int = 0) -> NDArray[Any]:
        """Wait for `stream`, then return a host copy; dtypes that NumPy lacks are returned as unsigned integers."""
        self._cuda.stream_synchronize(stream, self.device)
        return self._bytes.view(self.dtype.storage).reshape(self.shape).copy()

    def peek(self) -> NDArray[Any]:
        """Return a host copy of the current values, without waiting for a stream."""
        return self._bytes.view(self.dtype.storage).reshape(self.shape).copy()

    def fill(self, value: Any, stream: int = 0) -> None:
        """Enqueue a kernel on `stream` that fills the array with `value`."""
        memory, ptr, nbytes, storage, device = self._cuda.memory, self.ptr, self.nbytes, self.dtype.storage, self.device
        self._cuda.kernel(stream, lambda: memory.at(ptr, nbytes, device).view(storage).fill(value), device)

    def __repr__(self) -> str:
        return f"FakeArray(shape={self.shape}, dtype={self.dtype.name}, device={self.device})"
