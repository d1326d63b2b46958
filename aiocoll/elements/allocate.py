"""Allocation of arrays like an existing buffer, and the check that two buffers are on the same device."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiocoll.elements.adapters import ArrayAdapter, adapter_of, cannot_allocate
from aiocoll.elements.buffers import Buffer, view
from aiocoll.elements.device import UNKNOWN, DeviceArray, place_of
from aiocoll.elements.dtypes import array_dtype

__all__ = ["empty_like", "overwrite", "same_place", "spare"]


def empty_like(buffer: Buffer) -> Any:
    """Return a new array with the shape, dtype and device of `buffer`, from NumPy or the library of its array.

    Raises:
        TypeError: `buffer` is on a device, and its library has no adapter.
    """
    if not isinstance(buffer.array, DeviceArray):
        return np.empty(buffer.shape, array_dtype(buffer.dtype))
    return _adapter(buffer.result).empty_like(buffer.result)


def overwrite(obj: Any, values: Any) -> Any:
    """Copy `values`, which `empty_like` has made, to `obj`; return `obj`, or a new array if `obj` is immutable."""
    buffer = view(obj)
    if isinstance(buffer.array, DeviceArray):
        _adapter(obj).overwrite(obj, values)
        return obj
    buffer.array[:] = view(values).array
    return buffer.finish()


def spare(buffer: Buffer) -> Buffer:
    """Return a buffer of new memory, whose `writeback` copies the data to `buffer`.

    Raises:
        TypeError: `buffer` is on a device, and its library has no adapter.
    """
    if isinstance(buffer.array, DeviceArray):
        return _adapter(buffer.result).spare(buffer)
    fresh = np.empty_like(buffer.array)

    def writeback() -> Any:
        buffer.array[:] = fresh
        return buffer.finish()

    made = Buffer(fresh, buffer.dtype, buffer.shape, buffer.result, writeback)
    made.count = buffer.count
    return made


def same_place(a: Buffer, a_name: str, b: Buffer, b_name: str, rank: int | None = None) -> None:
    """Check that two arrays of a call are both on the host or on the same device.

    Args:
        a: one array.
        a_name: its name in error messages.
        b: the other array.
        b_name: its name in error messages.
        rank: index of `a` in the list `a_name`; None if `a` is not from a list.

    Raises:
        TypeError: they are in different places.
    """
    x, y = a.array, b.array
    differs: bool = isinstance(x, DeviceArray) or isinstance(y, DeviceArray)
    if isinstance(x, DeviceArray) and isinstance(y, DeviceArray) and x.kind == y.kind:
        # An UNKNOWN device number may stand for any device.
        differs = x.device != y.device and UNKNOWN not in (x.device, y.device)
    if differs:
        name = a_name if rank is None else f"{a_name}[{rank}]"
        raise TypeError(
            f"{name} is {place_of(x)}, {b_name} is {place_of(y)}: all arrays of a call must be on one device"
        )


def _adapter(obj: Any) -> ArrayAdapter:
    """Return the adapter for an array on a device."""
    found = adapter_of(obj)
    if found is None:
        raise cannot_allocate(obj)
    return found
