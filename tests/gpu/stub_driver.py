"""A stub of libcuda with C functions that record their calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

#: Values that the stub returns: the device of any address, the flags of any CUDA context, and its state.
DEVICE, FLAGS, ACTIVE = 1, 0, 1
#: The handle of device 0's primary context; device n has this number plus n.
CONTEXT = 0x5500_0000_0000
#: The stream capture modes that threads have requested.
MODES: list[int] = []
NAME = ctypes.create_string_buffer(b"CUDA_ERROR_OF_A_STUB")


class Log:
    """A record of the calls of a stub library.

    Attributes:
        calls: name and arguments of each call.
        status: status to return, by name of the function; 0 for others.
        hook: called with the name of each function.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status: dict[str, int] = {}
        self.hook: Callable[[str], object] = lambda name: None

    def __call__(self, name: str, args: tuple[Any, ...]) -> int:
        self.calls.append((name, args))
        self.hook(name)
        return self.status.get(name, 0)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def driver(call: Callable[[str, tuple[Any, ...]], Any]) -> Any:
    """Return a stub of libcuda.

    Args:
        call: called with the name and the arguments of each function; returns its status.
    """

    def function(name: str, write: Callable[..., None], *types: Any) -> Any:
        def called(*args: Any) -> int:
            status = call(name, tuple(arg for arg, kind in zip(args, types, strict=True) if kind is not Pointer))
            if not status:
                write(*args)
            return int(status or 0)

        # Declare types, since ctypes would otherwise pass 64-bit handles and addresses as 32 bits.
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(called)

    return SimpleNamespace(
        cuInit=function("cuInit", write_nothing, ctypes.c_uint),
        cuEventQuery=function("cuEventQuery", write_nothing, ctypes.c_uint64),
        cuStreamWriteValue32_v2=function(
            "cuStreamWriteValue32_v2", write_nothing, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        ),
        cuDeviceGet=function("cuDeviceGet", lambda where, device: write_number(where, device), Pointer, ctypes.c_int),
        cuDevicePrimaryCtxGetState=function(
            "cuDevicePrimaryCtxGetState",
            lambda device, flags, active: (write_number(flags, FLAGS), write_number(active, ACTIVE)),
            ctypes.c_int,
            Pointer,
            Pointer,
        ),
        cuDevicePrimaryCtxRetain=function(
            "cuDevicePrimaryCtxRetain",
            lambda where, device: write_number(where, CONTEXT + device, ctypes.c_uint64),
            Pointer,
            ctypes.c_int,
        ),
        cuCtxSetCurrent=function("cuCtxSetCurrent", write_nothing, ctypes.c_uint64),
        cuPointerGetAttribute=function(
            "cuPointerGetAttribute",
            lambda where, attribute, address: write_number(where, DEVICE),
            Pointer,
            ctypes.c_int,
            ctypes.c_uint64,
        ),
        cuThreadExchangeStreamCaptureMode=function("cuThreadExchangeStreamCaptureMode", exchange_mode, Pointer),
        cuGetErrorName=function(
            "cuGetErrorName",
            lambda status, where: write_number(where, ctypes.addressof(NAME), ctypes.c_uint64),
            ctypes.c_int,
            Pointer,
        ),
    )


class Pointer(ctypes.c_void_p):
    """A pointer parameter through which a C function returns a result."""


def write_nothing(*args: Any) -> None:
    """Write no result, for functions that only return a status."""


def exchange_mode(where: Any) -> None:
    """Record the requested stream capture mode, and return 0 as the previous mode through the pointer."""
    MODES.append(ctypes.c_int.from_address(where.value).value)
    write_number(where, 0)


def write_number(where: Any, value: int, kind: Any = ctypes.c_int) -> None:
    kind.from_address(where.value).value = value
