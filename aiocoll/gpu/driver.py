"""CUDA driver calls by ctypes, for which CuPy would hold the GIL or create a CUDA context.

The driver may block a call for as long as a kernel runs. A call that blocks while it holds the GIL blocks all threads,
even the one that would abort the kernel. Nearly every call of the CUDA runtime makes a context on the thread's device.
"""

from __future__ import annotations

import ctypes
from typing import Any

from aiocoll.gpu.api import DeviceError

__all__ = ["CAPTURES", "HARMLESS", "Driver", "load"]

#: CUDA error codes after which CUDA remains usable: invalid argument, device or handle, out of memory, graph capture.
#: The CUDA driver and runtime use the same codes.
HARMLESS = frozenset({1, 2, 101, 400, *range(900, 909)})
#: CUDA error codes that a graph capture causes.
CAPTURES = range(900, 909)
_SUCCESS, _NOT_READY = 0, 600
#: CU_STREAM_CAPTURE_MODE_RELAXED: calls of this thread do not invalidate the graph captures of other threads.
_RELAXED = 2
#: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: the attribute of a memory address that gives its device number.
_DEVICE_ORDINAL = 9

_SIGNATURES = {
    "cuInit": (ctypes.c_uint,),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint),
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64),
    "cuThreadExchangeStreamCaptureMode": (ctypes.c_void_p,),
    "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
}


class Driver:
    """Bindings to the few CUDA driver functions that every implementation of `Cuda` needs.

    Only `use` makes a context, and only `stream_write` needs a context in the thread.

    Args:
        library: libcuda, as returned by `ctypes.CDLL`.

    Raises:
        DeviceError: the driver cannot be used.
    """

    def __init__(self, library: Any) -> None:
        self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        for name, call in self._calls.items():
            call.argtypes, call.restype = _SIGNATURES[name], ctypes.c_int
        self._query = self._calls["cuEventQuery"]
        #: Primary CUDA contexts by device number. As in the CUDA runtime, they are never released.
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def use(self, device: int) -> None:
        """Make `device` the current device of this thread, in the primary context, as the CUDA runtime does."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(device))
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def relax(self) -> None:
        """Prevent CUDA calls of this thread from invalidating the CUDA graph captures of other threads."""
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def event_done(self, event: int) -> bool:
        """Return whether an event is done; CUDA runtime events are driver events, too."""
        status = self._query(event)
        if status in (_SUCCESS, _NOT_READY):
            return bool(status == _SUCCESS)
        raise self._error("cuEventQuery", status)

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Enqueue a write of a 32-bit value to host memory.

        A reader that sees the value also sees the results of all earlier work on the stream.
        """
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def has_context(self, device: int) -> bool:
        """Return whether a device's primary context, which the CUDA runtime uses, exists in this process."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", self._handle(device), ctypes.byref(flags), ctypes.byref(active))
        return bool(active.value)

    def device_of(self, address: int) -> int:
        """Return the number of the device that owns the memory at `address`."""
        device = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(device), _DEVICE_ORDINAL, address)
        return device.value

    def _handle(self, device: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        return handle

    def _call(self, name: str, *args: Any) -> None:
        status = self._calls[name](*args)
        if status != _SUCCESS:
            raise self._error(name, status)

    def _error(self, name: str, status: int) -> DeviceError:
        text = ctypes.c_char_p()
        found = self._calls["cuGetErrorName"](status, ctypes.byref(text)) == _SUCCESS and text.value
        return DeviceError(
            name, found.decode() if found else f"status {status}", fatal=status not in HARMLESS, status=status
        )


def load() -> Driver:
    """Load libcuda, the CUDA driver library of this machine, and return its bindings.

    Raises:
        OSError: there is no driver.
        DeviceError: the driver cannot be used.
    """
    return Driver(ctypes.CDLL("libcuda.so.1"))
