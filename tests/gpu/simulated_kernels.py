"""The kernels of `on_device/direct.py` in Python, for the fake CUDA."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np

from ..fakes.cuda import FakeCuda
from ..fakes.memory import HOST
from .stub_driver import Pointer, write_number

#: The interval in seconds at which a waiting kernel polls its flag.
LOOK = 0.0005
_MODULE = 0x7F0D_0000_0000


def kernel_functions(cuda: FakeCuda) -> dict[str, Callable[..., None]]:
    """Return Python replacements for the cuda.h functions that load and launch kernels."""

    def until(flag: int, nanoseconds: int) -> None:
        end, never = monotonic() + nanoseconds / 1e9, threading.Event()
        looked_at = cuda.memory.at(flag, 4, HOST).view(np.int32)
        while not (looked_at[0] or cuda.blocked.is_closed) and monotonic() < end:
            cuda.blocked.wait(never, LOOK)

    def add(values: int, number: float, count: int, device: int) -> None:
        cuda.memory.at(values, 8 * count, device).view(np.float64)[:] += number

    kernels: dict[bytes, tuple[Callable[..., None], tuple[Any, ...]]] = {
        b"until": (until, (ctypes.c_uint64, ctypes.c_uint64)),
        b"add": (add, (ctypes.c_uint64, ctypes.c_double, ctypes.c_uint64)),
    }
    names = list(kernels)

    def load(where: Pointer, image: Pointer) -> None:
        text = ctypes.string_at(image.value or 0)
        assert all(b".visible .entry " + name + b"(" in text for name in names)
        write_number(where, _MODULE, ctypes.c_uint64)

    def function(where: Pointer, module: int, name: Pointer) -> None:
        assert module == _MODULE
        write_number(where, _MODULE + 1 + names.index(ctypes.string_at(name.value or 0)), ctypes.c_uint64)

    def launch(kernel: int, *more: Any) -> None:
        *_, stream, given, extra = more
        assert extra.value is None
        device, name = cuda.current(), names[kernel - _MODULE - 1]
        run, kinds = kernels[name]
        places = (ctypes.c_void_p * len(kinds)).from_address(given.value)
        arguments = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        if name == b"add":
            arguments.append(device)
        cuda.kernel(stream, lambda: run(*arguments), device)

    def begin_capture(stream: int, mode: int) -> None:
        assert mode == 0, f"capture mode {mode}; the fake supports the default mode only"
        cuda.capture(stream, True)

    def end_capture(stream: int, graph: Pointer) -> None:
        cuda.capture(stream, False)
        write_number(graph, _MODULE, ctypes.c_uint64)

    return {
        "cuModuleLoadData": load,
        "cuModuleGetFunction": function,
        "cuLaunchKernel": launch,
        "cuStreamBeginCapture_v2": begin_capture,
        "cuStreamEndCapture": end_capture,
        "cuGraphDestroy": lambda graph: None,
    }
