"""Flat views of arrays: directly for NumPy arrays and host protocols, by adapters for other libraries.

A buffer shares the caller's memory if that memory is C-contiguous. Otherwise the buffer is a staging copy, and
`Buffer.finish` copies the result back. Device memory is a `DeviceArray`: only its address is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiocoll.elements.adapters import (
    adapter_of_attribute,
    adapter_of_type,
    adapters,
    dlpack_adapter,
    dlpack_kind,
    provided_adapter_of,
)
from aiocoll.elements.device import DeviceArray
from aiocoll.elements.dtypes import DType, by_name, from_numpy
from aiocoll.elements.strides import check_disjoint

__all__ = [
    "Buffer",
    "byte_view",
    "clash",
    "is_scalar",
    "operand",
    "overlaps",
    "scalar",
    "share",
    "view",
]

# DLPack device types of memory that the CPU can read and write: host memory (1), and memory pinned for a device (3).
_DLPACK_HOST = (1, 3)
# Up to this number of arrays, comparing all pairs is faster than sorting the arrays.
_FEW = 4
# bool comes before int, because it is a subclass of int and the first match counts.
_PYTHON_NUMBERS = (
    (bool, by_name("bool")),
    (int, by_name("int64")),
    (float, by_name("float64")),
    (complex, by_name("complex128")),
)
# A tuple made once: making a union of types for each call would take longer than `isinstance`.
_NUMBERS = (bool, int, float, complex, np.generic)
_NO_ARRAYS = (str, list, tuple, dict, set)


class Buffer:
    """A flat, contiguous view of an array to send from or receive into.

    Attributes:
        array: the caller's memory, or a staging copy of it: a 1-D ndarray of dtype ``dtype.storage``, with
            ``dtype.unit`` items for each element. Device memory is a `DeviceArray` (typed as an ndarray), whose `back`
            is the `writeback`.
        dtype: element type.
        shape: shape of the caller's object.
        count: number of elements.
        nbytes: number of bytes.
        result: the caller's object, which is the operation's result if there is no `writeback`.
        writeback: copies a staging copy back and returns the result; None if the memory is shared.
    """

    __slots__ = ("array", "count", "dtype", "nbytes", "result", "shape", "writeback")

    def __init__(
        self,
        array: npt.NDArray[Any],
        dtype: DType,
        shape: tuple[int, ...],
        result: Any,
        writeback: Callable[[], Any] | None = None,
    ) -> None:
        self.array = array
        self.dtype = dtype
        self.shape = shape
        self.count: int = array.size
        self.nbytes: int = array.nbytes
        self.result = result
        self.writeback = writeback

    def finish(self) -> Any:
        """Copy the data back to the caller's memory if it was staged; return the operation's result."""
        return self.result if self.writeback is None else self.writeback()


def view(obj: Any, *, name: str = "tensor", writable: bool = True) -> Buffer:
    """Return a flat view of an array, without a copy where possible.

    Args:
        obj: a NumPy or CuPy array of any shape, a torch tensor on the CPU or a CUDA device, or an object with the
            buffer protocol, ``__array_interface__``, ``__cuda_array_interface__`` or DLPack. Immutable arrays (JAX's)
            on the host are staged, and the result is a new array.
        name: its name in error messages.
        writable: whether the operation writes to it.

    Raises:
        TypeError: it is not an array, or its dtype cannot be exchanged.
        ValueError: the operation writes to it, but it is read-only or its elements share memory.
    """
    # The NumPy flag `carray` means contiguous, aligned and writeable.
    if type(obj) is np.ndarray and obj.flags.carray:
        return share(obj, obj, name)
    if isinstance(obj, np.ndarray):
        return _view_numpy(obj, obj, name, writable)
    adapter = adapter_of_type(type(obj))
    return _view_by_protocol(obj, name, writable) if adapter is None else adapter.view(obj, name, writable)


def operand(obj: Any, *, writable: bool) -> Buffer:
    """Return the buffer of an array or of a number: its `view` or its `scalar`."""
    if isinstance(obj, np.ndarray):
        return view(obj, writable=writable)
    adapter = adapter_of_type(type(obj))
    if adapter is not None:
        return adapter.view(obj, "tensor", writable)
    return scalar(obj) if is_scalar(obj) else _view_by_protocol(obj, "tensor", writable)


def _view_by_protocol(obj: Any, name: str, writable: bool) -> Buffer:
    """Return a view of an object whose library is not registered, by a protocol that the object supports."""
    if obj is None or isinstance(obj, _NO_ARRAYS) or is_scalar(obj):
        raise _array_type_error(obj, name)
    adapter = adapter_of_attribute(obj)
    if adapter is None and (kind := dlpack_kind(obj)) is not None and kind not in _DLPACK_HOST:
        adapter = dlpack_adapter(kind) or provided_adapter_of(obj)
    if adapter is not None:
        return adapter.view(obj, name, writable)
    array = _import_array(obj, name)
    if array is not None:
        return _view_numpy(array, obj, name, writable)
    adapter = provided_adapter_of(obj)
    if adapter is None:
        raise _array_type_error(obj, name)
    return adapter.view(obj, name, writable)


def is_scalar(value: Any) -> bool:
    """Return whether `value` is a number that `scalar` accepts."""
    return isinstance(value, _NUMBERS)


def scalar(value: Any) -> Buffer:
    """Return a one-element buffer (shape ``()``) for a number. The result is a number of the same type.

    A Python float is sent as float64, int as int64, bool as bool, complex as complex128. NumPy scalars keep their type.

    Raises:
        TypeError: `value` is not a number.
        OverflowError: `value` is an int that does not fit in 64 bits.
    """
    if isinstance(value, np.generic):
        given = np.array(value)
        dtype = from_numpy(given.dtype)
        buffer = Buffer(given.reshape(1).view(dtype.storage), dtype, (), value, lambda: given[()])
        buffer.count = 1
        return buffer
    if not is_scalar(value):
        raise TypeError(f"expected a number, not {type(value).__name__}")
    dtype = next(dtype for kind, dtype in _PYTHON_NUMBERS if isinstance(value, kind))
    try:
        array = np.array([value], dtype.storage)
    except OverflowError:
        raise OverflowError(f"the int {value} does not fit in int64; pass an array of another dtype") from None
    return Buffer(array, dtype, (), value, array.item)


def overlaps(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether two flat arrays share any memory."""
    try:
        return np.may_share_memory(a, b)  # it compares the arrays' bounds, which is exact for contiguous arrays
    except TypeError:  # one array is on a device; this check is here, so that it costs other calls nothing
        return isinstance(a, DeviceArray) and a.overlaps(b)


def clash(written: Sequence[npt.NDArray[Any]], read: Sequence[npt.NDArray[Any]] = ()) -> tuple[int, int] | None:
    """Return the positions of two flat arrays that share memory, at least one of them written; None if there are none.

    Returns:
        Two positions in ``[*written, *read]``, ascending, or None.

    Cost: n log n time for n arrays.
    """
    arrays = [*written, *read]
    if len(arrays) <= _FEW:
        for first, array in enumerate(written):
            for second in range(first + 1, len(arrays)):
                if overlaps(array, arrays[second]):
                    return first, second
        return None
    spans = sorted((_address(array), array.nbytes, index) for index, array in enumerate(arrays) if array.nbytes)
    # For all arrays so far, and for the written arrays only: the highest end address and the index of this array.
    any_end, any_index, written_end, written_index = 0, -1, 0, -1
    for start, nbytes, index in spans:
        end, is_written = start + nbytes, index < len(written)
        if start < written_end:
            return min(index, written_index), max(index, written_index)
        if is_written and start < any_end:
            return index, any_index
        if end > any_end:
            any_end, any_index = end, index
        if is_written:
            written_end, written_index = end, index
    return None


def _address(array: Any) -> int:
    address: int = array.ptr if isinstance(array, DeviceArray) else array.__array_interface__["data"][0]
    return address


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a flat array, which may be empty, as a memoryview of format ``"B"``."""
    return array.view(np.uint8).data


def share(array: npt.NDArray[Any], obj: Any, name: str) -> Buffer:
    """Return a view of a contiguous, aligned array. This function must be fast: nearly every call uses it."""
    try:
        dtype = from_numpy(array.dtype)
    except TypeError as exc:
        raise TypeError(f"{name}: {exc}") from None
    shape = array.shape
    flat = array if len(shape) == 1 else array.reshape(-1)
    if flat.dtype is not dtype.storage:
        count, flat = flat.size, flat.view(dtype.storage)
        buffer = Buffer(flat, dtype, shape, obj)
        buffer.count = count
        return buffer
    return Buffer(flat, dtype, shape, obj)


def _view_numpy(array: npt.NDArray[Any], obj: Any, name: str, writable: bool) -> Buffer:
    """Return a view of `array`, an ndarray of any layout made from the memory of the caller's object `obj`."""
    masked = sys.modules.get("numpy.ma")  # NumPy loads this module only when it is used
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(f"{name} is a masked array; pass {name}.filled(...) or its .data")
    array = np.asarray(array)
    if writable and not array.flags.writeable:
        return _replace(array, obj, name)
    if array.flags.c_contiguous and array.flags.aligned:
        return share(array, obj, name)
    buffer = share(array.copy(order="C"), obj, name)
    if writable:
        check_disjoint(array.strides, array.shape, array.itemsize, name, f"{name}.copy()")
        staged = buffer.array

        def writeback() -> Any:
            array[...] = staged.view(array.dtype).reshape(array.shape)
            return obj

        buffer.writeback = writeback
    return buffer


def _replace(array: npt.NDArray[Any], obj: Any, name: str) -> Buffer:
    """Stage an immutable array. The operation's result is then a new array of the same library."""
    if isinstance(obj, np.ndarray) or not hasattr(obj, "__array_namespace__"):
        raise ValueError(f"{name} is read-only, but the result is written to it; pass a writable copy")
    fresh = array.copy(order="C")
    buffer = share(fresh, obj, name)
    buffer.writeback = lambda: obj.__array_namespace__().asarray(fresh)
    return buffer


def _import_array(obj: Any, name: str) -> npt.NDArray[Any] | None:
    """Return an ndarray that shares the memory of a foreign array; None if the array supports no such protocol."""
    try:
        memory = memoryview(obj)
    except (TypeError, BufferError):
        pass
    else:
        try:
            return np.asarray(memory)
        except (TypeError, ValueError, NotImplementedError) as exc:
            raise TypeError(f"{name}: elements of buffer format {memory.format!r} are not supported") from exc
    if hasattr(obj, "__array_interface__"):
        return np.asarray(obj)
    if (device := dlpack_kind(obj)) is not None:
        if device not in _DLPACK_HOST:
            places = " or on ".join(["the CPU", *_device_labels()])
            raise TypeError(f"{name} is on a device of DLPack type {device}: it must be on {places}")
        try:
            return np.from_dlpack(obj)
        except (BufferError, RuntimeError, TypeError) as exc:
            if hasattr(obj, "__array_namespace__") and hasattr(obj, "__array__"):
                return _convert_array(obj, name)
            raise TypeError(f"{name}: NumPy cannot import this {type(obj).__name__} by DLPack: {exc}") from exc
    return None


def _convert_array(obj: Any, name: str) -> npt.NDArray[Any]:
    """Convert an array by its `__array__` method, the only way for dtypes from ml_dtypes, such as bfloat16.

    The returned array is read-only, because it may be a copy.
    """
    try:
        array: npt.NDArray[Any] = np.asarray(obj).view()
    except (BufferError, RuntimeError, TypeError) as exc:
        raise TypeError(f"{name}: NumPy cannot convert this {type(obj).__name__}: {exc}") from exc
    array.flags.writeable = False
    return array


def _array_type_error(obj: Any, name: str) -> TypeError:
    scipy = sys.modules.get("scipy.sparse")
    if scipy is not None and scipy.issparse(obj):
        return TypeError(
            f"{name} must be a dense array, not a {type(obj).__name__}: only allreduce, reduce, broadcast, allgather "
            "and gather accept sparse arrays, and send and recv outside of a batch"
        )
    hint = f"; pass {name}.to_numpy()" if hasattr(obj, "to_numpy") else ""
    return TypeError(f"{name} must be {_accepted_kinds()}, not {type(obj).__name__}{hint}")


def _accepted_kinds() -> str:
    """Return a text that lists the kinds of arrays that calls accept, for error messages."""
    names = adapters.names()
    arrays = ["a NumPy array", *(noun for name in names if (noun := adapters.get(name).noun))]
    protocols = ["the buffer protocol", "__array_interface__", *adapters.attributes]
    return f"{', '.join(arrays)}, or an object with {', '.join(protocols)} or DLPack"


def _device_labels() -> list[str]:
    """Return the labels of the devices whose arrays a call accepts through DLPack, for error messages."""
    found = [adapters.get(name) for name in adapters.names() if name.startswith("dlpack:")]
    return [adapter.label for adapter in found if adapter.label]
