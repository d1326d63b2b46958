"""The adapter for CuPy arrays. It never imports CuPy: with a CuPy array, the program has imported it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from aiocoll.arrays.cuda_array import CudaArray, cuda_dtype, spare_buffer
from aiocoll.elements.adapters import ArrayAdapter
from aiocoll.elements.buffers import Buffer
from aiocoll.elements.device import CopyBack
from aiocoll.elements.strides import check_disjoint

__all__ = ["CUPY"]


class _CupyArrays(ArrayAdapter):
    """The adapter for CuPy arrays, which CuPy itself copies on the caller's stream if not contiguous."""

    library = "cupy"
    noun = "a CuPy array"

    def owns(self, kind: type) -> bool:
        """Return whether the type `kind` is a CuPy array type."""
        return issubclass(kind, getattr(sys.modules.get("cupy"), "ndarray", ()))

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        """Return a flat view of a `cupy.ndarray`."""
        cupy: Any = sys.modules["cupy"]
        dtype = cuda_dtype(array.dtype, name)
        device = array.device.id
        stream = cupy.cuda.get_current_stream(device).ptr
        flat: Any
        if array.flags.c_contiguous:
            flat = CudaArray(array.data.ptr, array.size, dtype, device, stream, array)
            return Buffer(flat, dtype, tuple(array.shape), array)
        if writable:
            check_disjoint(array.strides, array.shape, array.dtype.itemsize, name, f"{name}.copy()")
        with cupy.cuda.Device(device):
            dense = cupy.ascontiguousarray(array)
        back = CopyBack(_copy_into(cupy, array, dense), stream, array) if writable else None
        flat = CudaArray(dense.data.ptr, dense.size, dtype, device, stream, (array, dense), back)
        return Buffer(flat, dtype, tuple(array.shape), array, back)

    def empty_like(self, array: Any) -> Any:
        """Return a new contiguous array on the device of `array`."""
        with array.device:
            return sys.modules["cupy"].empty(array.shape, array.dtype)

    def overwrite(self, array: Any, values: Any) -> None:
        """Copy `values` into `array`, on the array's device and CuPy's current stream."""
        with array.device:
            array[...] = values

    def spare(self, buffer: Buffer) -> Buffer:
        """Return a temporary buffer that replaces `buffer` during an operation; see `spare_buffer`."""
        fresh = self.empty_like(buffer.result)
        return spare_buffer(buffer, fresh.data.ptr, fresh, _copy_into(sys.modules["cupy"], buffer.result, fresh))


def _copy_into(cupy: Any, array: Any, dense: Any) -> Callable[[int], None]:
    def copy(stream: int) -> None:
        with array.device, cupy.cuda.Stream.from_external(_ForeignStream(stream)):
            array[...] = dense

    return copy


class _ForeignStream:
    """A CUDA stream address wrapped in the ``__cuda_stream__`` protocol, so that CuPy can use the stream."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


CUPY = _CupyArrays()
