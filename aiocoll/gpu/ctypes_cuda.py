"""CUDA by ctypes and libcuda, for machines that have torch and its libraries, but not CuPy.

ctypes releases the GIL in every call. Signatures and numbers come from cuda.h. Names end in _v2 where the header
defines them so. The driver has no function that multiplies on a device, so torch does that.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, by_name
from aiocoll.gpu.api import DeviceError, Kernels
from aiocoll.gpu.driver import Driver

__all__ = ["SIGNATURES", "CtypesCuda"]

_INT, _UINT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
#: Argument types of the CUDA driver functions that only this module calls. Handles and host addresses are pointers.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (_POINTER,),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGetPCIBusId": (_POINTER, _INT, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuCtxGetDevice": (_POINTER,),
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamIsCapturing": (_POINTER, _POINTER),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _UINT),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventSynchronize": (_POINTER,),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuMemcpyDtoHAsync_v2": (_POINTER, ctypes.c_uint64, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, _POINTER, _SIZE, _POINTER),
    "cuMemcpyDtoDAsync_v2": (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER),
    "cuMemAllocAsync": (_POINTER, _SIZE, _POINTER),
    "cuMemFreeAsync": (ctypes.c_uint64, _POINTER),
}
_NON_BLOCKING = 1
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_MAJOR, _MINOR = 75, 76
_INVALID_CONTEXT = 201
_NO_DEVICE = -1
_BUS_ID = 64


class CtypesCuda(Driver):
    """An implementation of `Cuda` that calls the CUDA driver by ctypes.

    Args:
        library: libcuda, as returned by `ctypes.CDLL`.

    Raises:
        DeviceError: the driver cannot be used.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        for name, types in SIGNATURES.items():
            call = self._calls[name] = getattr(library, name)
            call.argtypes, call.restype = types, _INT
        self.kernels: Kernels = _TorchKernels()

    def version(self) -> int:
        """Return the CUDA version that the driver supports, such as 12080."""
        return self._number("cuDriverGetVersion")

    def device_count(self) -> int:
        """Return the number of devices that this process may use."""
        return self._number("cuDeviceGetCount")

    def bus_id(self, device: int) -> str:
        """Return the PCI bus id of a device."""
        text = ctypes.create_string_buffer(_BUS_ID)
        self._call("cuDeviceGetPCIBusId", text, _BUS_ID, self._handle(device))
        return text.value.decode()

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability of the device."""
        handle = self._handle(device)
        major, minor = (self._number("cuDeviceGetAttribute", each, handle) for each in (_MAJOR, _MINOR))
        return major, minor

    def current(self) -> int:
        """Return the number of this thread's current device; -1 if there is none."""
        try:
            return self._number("cuCtxGetDevice")
        except DeviceError as error:
            if error.status != _INVALID_CONTEXT:
                raise
            return _NO_DEVICE

    def has_context(self, device: int) -> bool:
        """Return whether this process has a context on the device; False for `_NO_DEVICE`."""
        return device != _NO_DEVICE and super().has_context(device)

    def stream_create(self) -> int:
        """Return a new CUDA stream."""
        return self._address("cuStreamCreate", _NON_BLOCKING)

    def stream_destroy(self, stream: int) -> None:
        """Destroy a CUDA stream."""
        self._call("cuStreamDestroy_v2", stream)

    def is_capturing(self, stream: int) -> bool:
        """Return whether work on `stream` is being captured into a CUDA graph."""
        status = ctypes.c_int()
        self._call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return bool(status.value)

    def event_create(self, sleeps: bool = False) -> int:
        """Return a new CUDA event."""
        return self._address("cuEventCreate", _DISABLE_TIMING | (_BLOCKING_SYNC if sleeps else 0))

    def event_destroy(self, event: int) -> None:
        """Destroy a CUDA event."""
        self._call("cuEventDestroy_v2", event)

    def event_record(self, event: int, stream: int) -> None:
        """Record `event` on `stream`; the event is done when all work enqueued on the stream so far is done."""
        self._call("cuEventRecord", event, stream)

    def event_synchronize(self, event: int) -> None:
        """Block this thread until the event is done."""
        self._call("cuEventSynchronize", event)

    def stream_wait(self, stream: int, event: int) -> None:
        """Make work that is enqueued on `stream` after this call wait for `event`."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def pinned(self, nbytes: int) -> NDArray[Any]:
        """Return page-locked host memory as a uint8 array."""
        if not nbytes:
            return np.empty(0, np.uint8)
        return np.asarray(
            _PinnedMemory(self._address("cuMemHostAlloc", nbytes, 0), nbytes, self._calls["cuMemFreeHost"])
        )

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from device memory to page-locked host memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, nbytes, stream)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from page-locked host memory to device memory."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy within device memory."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def scratch(self, nbytes: int, stream: int) -> int:
        """Allocate device memory in stream order, and return the address."""
        return self._address("cuMemAllocAsync", nbytes, stream)

    def scratch_free(self, address: int, stream: int) -> None:
        """Free memory from `scratch` in stream order: after the work that is enqueued on `stream` now."""
        self._call("cuMemFreeAsync", address, stream)

    def _number(self, name: str, *args: Any) -> int:
        number = ctypes.c_int()
        self._call(name, ctypes.byref(number), *args)
        return number.value

    def _address(self, name: str, *args: Any) -> int:
        address = ctypes.c_void_p()
        self._call(name, ctypes.byref(address), *args)
        return address.value or 0


class _TorchKernels:
    """An implementation of `Kernels` by torch."""

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        """Multiply `count` elements of `source` by `factor` into `target`."""
        torch = sys.modules.get("torch")
        kind = by_name(dtype)
        if kind.kind not in ("half", "float", "complex") or kind.itemsize == 1:
            raise DeviceError("scale", f"{dtype} cannot be multiplied on a device", fatal=False)
        if torch is None:
            raise DeviceError(
                "scale", "scaling needs CuPy or torch: install CuPy, or import torch before the call", fatal=False
            )
        number = factor if kind.kind == "complex" else factor.real
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                given, made = (_view_tensor(torch, at, count, kind) for at in (source, target))
                torch.mul(given, number, out=made)
        except Exception as error:  # torch may raise any exception
            raise DeviceError("scale", str(error), fatal=False) from error


class _PinnedMemory:
    """Page-locked host memory behind NumPy arrays, freed with the last array."""

    def __init__(self, address: int, nbytes: int, free: Callable[[int], int]) -> None:
        self._address = address
        self._free = free
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        self._free(self._address)


class _Memory:
    """Device memory as an array of bytes with ``__cuda_array_interface__``, which torch can view."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def _view_tensor(torch: Any, address: int, count: int, kind: DType) -> Any:
    """Return a torch tensor that views memory at `address` on the thread's current device."""
    return torch.as_tensor(_Memory(address, count * kind.itemsize), device="cuda").view(getattr(torch, kind.name))
