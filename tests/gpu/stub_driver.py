"""A libcuda that is called as the real one is, by C, and writes down how."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

#: What is written where calls give something back: the device of an address, flags, whether there is a context.
DEVICE, FLAGS, ACTIVE = 1, 0, 1
#: The primary context of device 0; those of others follow.
CONTEXT = 0x5500_0000_0000
#: The modes of capturing that threads have asked for.
MODES: list[int] = []
NAME = ctypes.create_string_buffer(b"CUDA_ERROR_OF_A_STUB")


class Log:
    """Records the calls of a stub library.

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
    """Return the library.

    Args:
        call: called with the name of every function and what it was given; returns its status.
    """

    def function(name: str, write: Callable[..., None], *types: Any) -> Any:
        def called(*args: Any) -> int:
            status = call(name, tuple(arg for arg, kind in zip(args, types, strict=True) if kind is not Pointer))
            if not status:
                write(*args)
            return int(status or 0)

        # Handles and addresses have 64 bits: without their types, ctypes would pass 32.
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(called)

    return SimpleNamespace(
        cuInit=function("cuInit", nothing, ctypes.c_uint),
        cuEventQuery=function("cuEventQuery", nothing, ctypes.c_uint64),
        cuStreamWriteValue32_v2=function(
            "cuStreamWriteValue32_v2", nothing, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        ),
        cuDeviceGet=function("cuDeviceGet", lambda where, device: put(where, device), Pointer, ctypes.c_int),
        cuDevicePrimaryCtxGetState=function(
            "cuDevicePrimaryCtxGetState",
            lambda device, flags, active: (put(flags, FLAGS), put(active, ACTIVE)),
            ctypes.c_int,
            Pointer,
            Pointer,
        ),
        cuDevicePrimaryCtxRetain=function(
            "cuDevicePrimaryCtxRetain",
            lambda where, device: put(where, CONTEXT + device, ctypes.c_uint64),
            Pointer,
            ctypes.c_int,
        ),
        cuCtxSetCurrent=function("cuCtxSetCurrent", nothing, ctypes.c_uint64),
        cuPointerGetAttribute=function(
            "cuPointerGetAttribute",
            lambda where, attribute, address: put(where, DEVICE),
            Pointer,
            ctypes.c_int,
            ctypes.c_uint64,
        ),
        cuThreadExchangeStreamCaptureMode=function("cuThreadExchangeStreamCaptureMode", exchange, Pointer),
        cuGetErrorName=function(
            "cuGetErrorName",
            lambda status, where: put(where, ctypes.addressof(NAME), ctypes.c_uint64),
            ctypes.c_int,
            Pointer,
        ),
    )


class Pointer(ctypes.c_void_p):
    """Where a result is written."""


def nothing(*args: Any) -> None:
    """Write nothing."""


def exchange(where: Any) -> None:
    """Take a thread's mode, and give back what it was."""
    MODES.append(ctypes.c_int.from_address(where.value).value)
    put(where, 0)


def put(where: Any, value: int, kind: Any = ctypes.c_int) -> None:
    kind.from_address(where.value).value = value
