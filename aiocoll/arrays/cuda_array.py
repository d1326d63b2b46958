"""`CudaArray`, a flat view of CUDA memory, and code that all adapters for CUDA arrays share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from aiocoll.elements.buffers import Buffer
from aiocoll.elements.device import CopyBack, DeviceArray
from aiocoll.elements.dtypes import DType, from_numpy

__all__ = ["KIND", "LABEL", "CudaArray", "cuda_dtype", "spare_buffer"]

#: Name of CUDA devices in the API, and in error messages.
KIND, LABEL = "cuda", "CUDA"


class CudaArray(DeviceArray):
    """A flat view of contiguous memory on a CUDA device, whatever library owns the memory.

    Only the address is used, so bfloat16 and float8 need no library that supports them.
    """

    __slots__ = ()

    kind: ClassVar[str] = KIND
    label: ClassVar[str] = LABEL


def cuda_dtype(dtype: np.dtype[Any], name: str) -> DType:
    """Return the element type for the NumPy dtype of a CUDA array.

    `name` is the name of the array argument in error messages.

    Raises:
        TypeError: elements of this dtype cannot be exchanged between devices.
    """
    try:
        found = from_numpy(dtype)
    except TypeError as exc:
        raise TypeError(f"{name}: {exc}") from None
    if found.kind in ("record", "pair"):
        raise TypeError(f"{name}: dtype {dtype} is supported on the host only; pass {name}.view('uint8')")
    return found


def spare_buffer(buffer: Buffer, ptr: int, fresh: Any, copy: Callable[[int], None]) -> Buffer:
    """Return a temporary buffer that replaces `buffer` during an operation, and is copied back at its end.

    Args:
        buffer: buffer of an array on a CUDA device.
        ptr: address of the new memory.
        fresh: the object that owns the new memory.
        copy: enqueues the copy to the caller's array on a stream.
    """
    old: Any = buffer.array
    back = CopyBack(copy, old.stream, buffer.result)
    array: Any = CudaArray(ptr, old.size, old.dtype, old.device, old.stream, (old.keep, fresh), back)
    return Buffer(array, buffer.dtype, buffer.shape, buffer.result, back)
