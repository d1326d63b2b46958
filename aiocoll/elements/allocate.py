"""New memory like that of a buffer, and the check that buffers are all on the host, or all on one device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from aiocoll.elements.buffers import Buffer, view
from aiocoll.elements.device import UNKNOWN, DeviceArray, device_of, where
from aiocoll.elements.dtypes import array_dtype
from aiocoll.loading import loading

__all__ = ["empty_like", "overwrite", "same_place", "spare"]


def empty_like(buffer: Buffer) -> Any:
    """Return a new array of the shape, dtype and device of `buffer`, made by NumPy or the library of its array.

    Raises:
        TypeError: it is on a device, and its library is not known.
    """
    if not isinstance(buffer.array, DeviceArray):
        return np.empty(buffer.shape, array_dtype(buffer.dtype))
    with loading("CUDA arrays"):
        from aiocoll.elements.device_views import empty_like as on_device
    return on_device(buffer.result, sys.modules.get("torch"), sys.modules.get("cupy"))


def overwrite(obj: Any, values: Any) -> Any:
    """Copy `values`, which `empty_like` made for `obj`, to it; return it, or a new array if it is immutable."""
    buffer = view(obj)
    if isinstance(buffer.array, DeviceArray):
        with loading("CUDA arrays"):
            from aiocoll.elements.device_views import overwrite as on_device
        on_device(obj, values)
        return obj
    buffer.array[:] = view(values).array
    return buffer.finish()


def spare(buffer: Buffer) -> Buffer:
    """Return a buffer of new memory to use instead of `buffer`; at the end it is copied to `buffer`.

    Raises:
        TypeError: it is on a device, and its library is not known.
    """
    if isinstance(buffer.array, DeviceArray):
        with loading("CUDA arrays"):
            from aiocoll.elements.device_views import spare as on_device
        array = on_device(buffer.array, buffer.result, sys.modules.get("torch"), sys.modules.get("cupy"))
        return Buffer(array, buffer.dtype, buffer.shape, buffer.result, array.back)
    fresh = np.empty_like(buffer.array)

    def writeback() -> Any:
        buffer.array[:] = fresh
        return buffer.finish()

    made = Buffer(fresh, buffer.dtype, buffer.shape, buffer.result, writeback)
    made.count = buffer.count
    return made


def same_place(a: Buffer, a_name: str, b: Buffer, b_name: str, rank: int | None = None) -> None:
    """Raise unless two arrays of a call are both on the host, or both on the same device.

    Args:
        a: one array.
        a_name: its name in error messages.
        b: the other array.
        b_name: its name in error messages.
        rank: index of `a` in the list `a_name`; None if it is in no list.

    Raises:
        TypeError: they are not.
    """
    x, y = device_of(a.array), device_of(b.array)
    # A device that is not known yet may be any device.
    if x != y and (x is None or y is None or UNKNOWN not in (x, y)):
        name = a_name if rank is None else f"{a_name}[{rank}]"
        raise TypeError(f"{name} is {where(x)}, {b_name} is {where(y)}: all arrays of a call must be on one device")
