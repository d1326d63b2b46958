"""Calls of libcuda by ctypes, which releases the GIL: CuPy makes them with the GIL held, or would make a context.

The driver may block a call for as long as a kernel runs. A call that blocks with the GIL held blocks all threads, also
the one that would end the kernel. And nearly every call of the runtime makes a context on the thread's device.
"""

from __future__ import annotations

import ctypes
from typing import Any

from aiocoll.gpu.api import DeviceError

__all__ = ["CAPTURES", "HARMLESS", "Driver", "load"]

#: Errors after which CUDA can still be used: arguments, too little memory, an invalid device or handle, a capture. The
#: driver and the runtime have the same numbers.
HARMLESS = frozenset({1, 2, 101, 400, *range(900, 909)})
#: Those of them that a capture into a graph is the cause of.
CAPTURES = range(900, 909)
_SUCCESS, _NOT_READY = 0, 600
#: Of a thread: calls that are not safe while another one captures are allowed (CU_STREAM_CAPTURE_MODE_RELAXED).
_RELAXED = 2
#: The attribute of an address that is the number of its device (CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).
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
    """Some of the driver's calls; none but `use` makes a context, and none but `stream_write` needs one in the thread.

    Args:
        library: libcuda, as `ctypes.CDLL` has loaded it.

    Raises:
        DeviceError: it cannot be used.
    """

    def __init__(self, library: Any) -> None:
        self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        for name, call in self._calls.items():
            call.argtypes, call.restype = _SIGNATURES[name], ctypes.c_int
        self._query = self._calls["cuEventQuery"]
        #: The primary contexts in use. They are never released, as the runtime does not release them.
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def use(self, device: int) -> None:
        """Make `device` the current device of this thread, for the runtime too: it shares the context."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(device))
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", context)

    def relax(self) -> None:
        """Let calls of this thread not disturb what other threads capture into graphs."""
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def event_done(self, event: int) -> bool:
        """Whether the event is done; an event of the runtime is one of the driver."""
        status = self._query(event)
        if status in (_SUCCESS, _NOT_READY):
            return bool(status == _SUCCESS)
        raise self._error("cuEventQuery", status)

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits behind what is on the stream; what is before it can be seen by whoever sees that."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def has_context(self, device: int) -> bool:
        """Whether the primary context of a device, the runtime's, has been made."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", self._handle(device), ctypes.byref(flags), ctypes.byref(active))
        return bool(active.value)

    def device_of(self, address: int) -> int:
        """Return the device whose memory lies at `address`."""
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
    """Return the driver of this machine.

    Raises:
        OSError: there is none.
        DeviceError: it cannot be used.
    """
    return Driver(ctypes.CDLL("libcuda.so.1"))
