"""CUDA arrays of CuPy, torch and others -> `DeviceArray`, without importing any of them.

Only addresses are read, so bfloat16 and float8 need no library that knows them. An array that is not contiguous is
copied by its own library, on the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from aiocoll.elements.device import UNKNOWN, DeviceArray, PutBack
from aiocoll.elements.dtypes import DType, by_name, of_numpy
from aiocoll.elements.strides import check_apart

__all__ = ["empty_like", "of_cupy", "of_dlpack", "of_interface", "of_torch", "overwrite", "spare"]

_DLPACK_CUDA = 2


def of_cupy(cupy: Any, array: Any, name: str, writable: bool) -> DeviceArray:
    """View a `cupy.ndarray`."""
    dtype = _dtype(array.dtype, name)
    device = array.device.id
    stream = cupy.cuda.get_current_stream(device).ptr
    if array.flags.c_contiguous:
        return DeviceArray(array.data.ptr, array.size, dtype, device, stream, array)
    if writable:
        check_apart(array.strides, array.shape, array.dtype.itemsize, name, f"{name}.copy()")
    with cupy.cuda.Device(device):
        dense = cupy.ascontiguousarray(array)
    back = PutBack(_into_cupy(cupy, array, dense), stream, array) if writable else None
    return DeviceArray(dense.data.ptr, dense.size, dtype, device, stream, (array, dense), back)


def of_torch(torch: Any, tensor: Any, dtype: DType, name: str, writable: bool) -> DeviceArray:
    """View a torch tensor on a CUDA device, of element type `dtype`; results never enter autograd.

    Raises:
        TypeError: it is sparse.
        ValueError: it is expanded, but the operation writes to it.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout} on a CUDA device: sparse tensors must be on the CPU")
    device = tensor.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    plain = tensor.detach() if tensor.requires_grad else tensor
    dense = plain.resolve_conj().resolve_neg().contiguous()
    ptr, back = dense.data_ptr(), None
    if writable and dense is not plain and ptr != plain.data_ptr():
        check_apart(plain.stride(), tuple(plain.shape), 1, name, f"{name}.clone()")
        back = PutBack(_into_torch(torch, plain, dense), stream, tensor)
    return DeviceArray(ptr, dense.numel(), dtype, device, stream, (tensor, dense), back)


def of_interface(obj: Any, name: str, writable: bool) -> DeviceArray:
    """View an object with ``__cuda_array_interface__``, version 2 or 3, whose library is not known.

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
        raise TypeError(f"{name}: its __cuda_array_interface__ has version {version}, it must be 2 or later")
    if stream == 0:
        raise TypeError(f"{name}: its __cuda_array_interface__ names stream 0, which the protocol forbids")
    dtype = _named(obj, found) or _dtype(found, name)
    if about.get("mask") is not None:
        raise TypeError(f"{name} is a masked array; pass its data alone")
    if writable and (read_only or _is_immutable(obj)):
        raise ValueError(f"{name} is read-only, but the result is written to it; pass a writable copy")
    if strides is not None and not _is_contiguous(strides, shape, dtype.itemsize):
        raise TypeError(f"{name} is not contiguous, and its library is not known: pass a contiguous copy")
    size = int(np.prod(shape, dtype=np.int64))
    # Without a stream there is nothing to wait for; the default stream always exists.
    return DeviceArray(ptr, size, dtype, _device_of(obj), stream or 0, obj)


def of_dlpack(take: Callable[[Any], Any], obj: Any, name: str, writable: bool) -> Any:
    """Return an array of CuPy or torch, which knows its stream, on the memory that `obj` exports by DLPack.

    Raises:
        TypeError: they cannot import it.
        ValueError: it is read-only, but the operation writes to it.
    """
    if writable and _is_immutable(obj):
        raise ValueError(f"{name} is read-only, but the result is written to it; pass a writable copy")
    try:
        return take(obj)
    except (BufferError, RuntimeError, TypeError, NotImplementedError) as exc:
        raise TypeError(f"{name}: this {type(obj).__name__} cannot be imported by DLPack: {exc}") from exc


def empty_like(obj: Any, torch: Any, cupy: Any) -> Any:
    """Return a new contiguous array like the CUDA array `obj`, made by its library (None: that one is not loaded).

    Raises:
        TypeError: it is of neither library.
    """
    if torch is not None and isinstance(obj, torch.Tensor):
        return torch.empty(obj.shape, dtype=obj.dtype, device=obj.device)
    if cupy is not None and isinstance(obj, cupy.ndarray):
        with obj.device:
            return cupy.empty(obj.shape, obj.dtype)
    raise TypeError(
        f"cannot allocate an array like a {type(obj).__name__}: pass outputs that share no memory with inputs"
    )


def overwrite(obj: Any, values: Any) -> None:
    """Copy `values`, made by `empty_like` for the CUDA array `obj`, to it, on its library's current stream."""
    if hasattr(obj, "copy_"):
        obj.detach().copy_(values)
    else:
        with obj.device:
            obj[...] = values


def spare(array: DeviceArray, obj: Any, torch: Any, cupy: Any) -> DeviceArray:
    """Return a new array to use instead of `array`, the view of `obj`; its `back` copies it to `obj`."""
    fresh = empty_like(obj, torch, cupy)
    if torch is not None and isinstance(obj, torch.Tensor):
        ptr, copy = fresh.data_ptr(), _into_torch(torch, obj.detach(), fresh)
    else:
        ptr, copy = fresh.data.ptr, _into_cupy(cupy, obj, fresh)
    back = PutBack(copy, array.stream, obj)
    return DeviceArray(ptr, array.size, array.dtype, array.device, array.stream, (array.keep, fresh), back)


def _into_cupy(cupy: Any, array: Any, dense: Any) -> Callable[[int], None]:
    def copy(stream: int) -> None:
        with array.device, cupy.cuda.Stream.from_external(_ForeignStream(stream)):
            array[...] = dense

    return copy


def _into_torch(torch: Any, plain: Any, dense: Any) -> Callable[[int], None]:
    def copy(stream: int) -> None:
        # torch accepts no handle for the default stream (0, 1).
        on = torch.cuda.ExternalStream(stream, plain.device) if stream > 1 else torch.cuda.default_stream(plain.device)
        with torch.cuda.stream(on):
            plain.copy_(dense)

    return copy


class _ForeignStream:
    """A stream of another library, by the CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


def _dtype(dtype: np.dtype[Any], name: str) -> DType:
    try:
        found = of_numpy(dtype)
    except TypeError as exc:
        raise TypeError(f"{name}: {exc}") from None
    if found.kind in ("record", "pair"):
        raise TypeError(f"{name}: dtype {dtype} is taken in arrays of the host only; here pass {name}.view('uint8')")
    return found


def _named(obj: Any, found: np.dtype[Any]) -> DType | None:
    """Return the type of bfloat16 and float8 elements; array interfaces only tell their width."""
    name = getattr(getattr(obj, "dtype", None), "name", None)
    if found.kind == "V" and isinstance(name, str):
        with suppress(TypeError):
            known = by_name(name)
            return known if known.itemsize == found.itemsize else None
    return None


def _is_immutable(obj: Any) -> bool:
    """Whether it is a JAX array: they never change, even if a protocol reports their memory as writable."""
    return type(obj).__module__.partition(".")[0] in ("jax", "jaxlib")


def _device_of(obj: Any) -> int:
    """Return the ordinal of the device of an object, or `UNKNOWN`."""
    ask = getattr(obj, "__dlpack_device__", None)
    if ask is None:
        return UNKNOWN
    kind, device = ask()
    return int(device) if kind == _DLPACK_CUDA else UNKNOWN


def _is_contiguous(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Whether elements are in C order without gaps; strides of dimensions with one element do not matter."""
    step = itemsize
    for stride, length in zip(reversed(strides), reversed(shape), strict=True):
        if length > 1 and stride != step:
            return 0 in shape
        step *= length
    return True
