"""Arrays on the devices of a fake CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, by_name, from_numpy

from .cuda import FakeCuda

#: What freed memory is filled with.
FREED = 0xDD


class FakeArray:
    """An array on a fake device, which other libraries see by `__cuda_array_interface__`.

    It is C-contiguous. Its memory goes when the last reference to it does, even if the device still works on it.

    Args:
        cuda: whose device.
        values: what it begins with; of bfloat16 and float8, the bits as unsigned integers.
        device: ordinal.
        dtype: needed where NumPy has none: bfloat16 and float8, or the name of one.
        stream: what `__cuda_array_interface__` tells that the data is ordered by; None: it tells nothing.

    Attributes:
        ptr: address on the device.
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
        """Return a copy as the host sees it when all that is on `stream` now is done; bits where NumPy has no dtype."""
        self._cuda.stream_synchronize(stream, self.device)
        return self._bytes.view(self.dtype.storage).reshape(self.shape).copy()

    def peek(self) -> NDArray[Any]:
        """Return a copy of what is there at this moment."""
        return self._bytes.view(self.dtype.storage).reshape(self.shape).copy()

    def fill(self, value: Any, stream: int = 0) -> None:
        """Write `value` everywhere, in the order of `stream`."""
        memory, ptr, nbytes, storage, device = self._cuda.memory, self.ptr, self.nbytes, self.dtype.storage, self.device
        self._cuda.kernel(stream, lambda: memory.at(ptr, nbytes, device).view(storage).fill(value), device)

    def __repr__(self) -> str:
        return f"FakeArray(shape={self.shape}, dtype={self.dtype.name}, device={self.device})"
