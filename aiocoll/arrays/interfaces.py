"""Adapters for CUDA arrays of any library: by ``__cuda_array_interface__``, or by DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from aiocoll.arrays.cuda_array import LABEL, CudaArray, cuda_dtype
from aiocoll.elements.adapters import ArrayAdapter
from aiocoll.elements.buffers import Buffer, view
from aiocoll.elements.device import UNKNOWN
from aiocoll.elements.dtypes import DType, by_name

__all__ = ["DLPACK", "INTERFACE", "ROCM"]

_DLPACK_CUDA = 2


class _InterfaceArrays(ArrayAdapter):
    """The adapter for objects with ``__cuda_array_interface__``."""

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        """Return a flat view of an object's CUDA memory."""
        flat: Any = _view_interface(array, name, writable)
        return Buffer(flat, flat.dtype, tuple(array.__cuda_array_interface__["shape"]), array)


class _DlpackArrays(ArrayAdapter):
    """The adapter for objects that export CUDA memory only by DLPack, which CuPy or torch imports."""

    label = LABEL

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        """Return a flat view of an object's CUDA memory, by importing the object into CuPy or torch.

        The program must have imported CuPy or torch.
        """
        library: Any = sys.modules.get("cupy") or sys.modules.get("torch")
        if library is None:
            raise TypeError(
                f"{name} exports its CUDA memory by DLPack only: pass cupy.from_dlpack({name}) or "
                f"torch.from_dlpack({name})"
            )
        buffer = view(_view_dlpack(library.from_dlpack, array, name, writable), name=name, writable=writable)
        buffer.result = array
        return buffer


class _RocmArrays(ArrayAdapter):
    """The adapter for objects on ROCm devices, which rejects them with a clear error."""

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        """Raise TypeError: ROCm is not supported."""
        raise TypeError(f"{name} is on a ROCm device, and ROCm is not supported: pass a copy on the host")


INTERFACE = _InterfaceArrays()
DLPACK = _DlpackArrays()
ROCM = _RocmArrays()


def _view_interface(obj: Any, name: str, writable: bool) -> CudaArray:
    """Return a flat view of the memory that ``obj.__cuda_array_interface__`` (version 2 or 3) describes.

    Raises:
        TypeError: it is masked, not contiguous, or its dtype cannot be exchanged.
        ValueError: it is read-only, but the operation writes to it.
    """
    about = obj.__cuda_array_interface__
    try:
        shape, (ptr, read_only), found = tuple(about["shape"]), about["data"], np.dtype(about["typestr"])
        version, strides, stream = about["version"], about.get("strides"), about.get("stream")
    except (KeyError, TypeError, ValueError) as exc:
        raise TypeError(f"{name}: its __cuda_array_interface__ is not complete: {exc!r}") from exc
    if version < 2:
        raise TypeError(f"{name}: its __cuda_array_interface__ has version {version}, but must have version 2 or later")
    if stream == 0:
        raise TypeError(f"{name}: its __cuda_array_interface__ names stream 0, which the protocol forbids")
    dtype = _dtype_by_name(obj, found) or cuda_dtype(found, name)
    if about.get("mask") is not None:
        raise TypeError(f"{name} is a masked array; pass its data alone")
    if writable and (read_only or _is_immutable(obj)):
        raise ValueError(f"{name} is read-only, but the result is written to it; pass a writable copy")
    if strides is not None and not _is_contiguous(strides, shape, dtype.itemsize):
        raise TypeError(f"{name} is not contiguous, and its library is not known: pass a contiguous copy")
    size = int(np.prod(shape, dtype=np.int64))
    # If the interface names no stream, the library has no pending work. Then use the default stream.
    return CudaArray(ptr, size, dtype, _device_of(obj), stream or 0, obj)


def _view_dlpack(take: Callable[[Any], Any], obj: Any, name: str, writable: bool) -> Any:
    """Import `obj` by DLPack into CuPy or torch, and return the CuPy or torch array, which has a stream.

    Raises:
        TypeError: the library cannot import `obj`.
        ValueError: `obj` is read-only, but the operation writes to it.
    """
    if writable and _is_immutable(obj):
        raise ValueError(f"{name} is read-only, but the result is written to it; pass a writable copy")
    try:
        return take(obj)
    except (BufferError, RuntimeError, TypeError, NotImplementedError) as exc:
        raise TypeError(f"{name}: this {type(obj).__name__} cannot be imported by DLPack: {exc}") from exc


def _dtype_by_name(obj: Any, found: np.dtype[Any]) -> DType | None:
    """Return the element type for the dtype name of `obj` if it is bfloat16 or float8; otherwise None.

    The NumPy dtype `found` has only the width of such elements.
    """
    name = getattr(getattr(obj, "dtype", None), "name", None)
    if found.kind == "V" and isinstance(name, str):
        with suppress(TypeError):
            known = by_name(name)
            return known if known.itemsize == found.itemsize else None
    return None


def _is_immutable(obj: Any) -> bool:
    """Return whether `obj` is a JAX array, which must not be modified even if its memory seems writable."""
    return type(obj).__module__.partition(".")[0] in ("jax", "jaxlib")


def _device_of(obj: Any) -> int:
    """Return the number of the CUDA device of `obj`; return `UNKNOWN` if `obj` does not report it."""
    ask = getattr(obj, "__dlpack_device__", None)
    if ask is None:
        return UNKNOWN
    kind, device = ask()
    return int(device) if kind == _DLPACK_CUDA else UNKNOWN


def _is_contiguous(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Return whether an array with these strides has its elements in C order without gaps.

    Strides of dimensions of length 1 do not matter.
    """
    step = itemsize
    for stride, length in zip(reversed(strides), reversed(shape), strict=True):
        if length > 1 and stride != step:
            return 0 in shape
        step *= length
    return True
