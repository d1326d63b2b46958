"""Memory access and kernels on real devices through the CUDA driver, without an array library.

It works with the arrays of any library. The kernels are written in PTX, which the driver compiles, so that no compiler
is needed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.gpu.ctypes_cuda import CtypesCuda

KERNELS = rb"""
.version 6.0
.target sm_60
.address_size 64

// until(flag, nanoseconds): wait until the int32 at `flag` is not 0, at most this time.
.visible .entry until(.param .u64 flag, .param .u64 nanoseconds)
{
    .reg .pred %is_open, %is_early;
    .reg .s32 %open;
    .reg .u64 %flag, %most, %start, %now, %passed;
    ld.param.u64 %flag, [flag];
    ld.param.u64 %most, [nanoseconds];
    mov.u64 %start, %globaltimer;
again:
    ld.volatile.s32 %open, [%flag];
    setp.ne.s32 %is_open, %open, 0;
    @%is_open bra over;
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %start;
    setp.lt.u64 %is_early, %passed, %most;
    @%is_early bra again;
over:
    ret;
}

// add(values, number, count): add a float64 to each of `count` others.
.visible .entry add(.param .u64 values, .param .f64 number, .param .u64 count)
{
    .reg .pred %is_there;
    .reg .u32 %block, %size, %thread, %blocks, %first, %all;
    .reg .u64 %at, %step, %count, %values, %address;
    .reg .f64 %number, %value;
    ld.param.u64 %values, [values];
    ld.param.f64 %number, [number];
    ld.param.u64 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %first, %block, %size, %thread;
    mul.lo.u32 %all, %blocks, %size;
    cvt.u64.u32 %at, %first;
    cvt.u64.u32 %step, %all;
next:
    setp.ge.u64 %is_there, %at, %count;
    @%is_there bra done;
    shl.b64 %address, %at, 3;
    add.u64 %address, %values, %address;
    ld.f64 %value, [%address];
    add.f64 %value, %value, %number;
    st.f64 [%address], %value;
    add.u64 %at, %at, %step;
    bra next;
done:
    ret;
}
"""

#: The number of bytes that one step of a copy transfers.
NBYTES = 1 << 20

_INT, _UINT, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
#: CUDA's default capture mode: an unsafe CUDA call of any thread invalidates the capture.
_GLOBAL = 0
#: Functions of cuda.h that only tests call.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuStreamBeginCapture_v2": (_POINTER, _INT),
    "cuStreamEndCapture": (_POINTER, _POINTER),
    "cuGraphDestroy": (_POINTER,),
    "cuModuleLoadData": (_POINTER, _POINTER),
    "cuModuleGetFunction": (_POINTER, _POINTER, _POINTER),
    "cuLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
}


class Direct:
    """An access to devices through the CUDA driver that leaves the thread's current device unchanged.

    Args:
        library: libcuda, loaded by `ctypes.CDLL`.

    Attributes:
        cuda: the driver.
    """

    def __init__(self, library: Any) -> None:
        self.cuda = CtypesCuda(library)
        self._calls = {name: getattr(library, name) for name in SIGNATURES}
        for name, call in self._calls.items():
            call.argtypes, call.restype = SIGNATURES[name], ctypes.c_int
        self._kernels: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._copying = threading.Lock()
        with self.on(0):
            self._block = self.cuda.pinned(NBYTES)  # allocated now: NCCL kernels would delay page-locking

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device current for this thread during a ``with`` block."""
        before = self.cuda.current()
        self.cuda.use(device)
        try:
            yield
        finally:
            if before >= 0:
                self.cuda.use(before)

    def write(self, address: int, values: NDArray[Any], device: int, stream: int) -> None:
        """Copy values to device memory, after the work already enqueued on `stream`."""
        for piece, locked, place in self._pieces(address, values, device):
            locked[:] = piece
            self.cuda.copy_to_device(place, locked.ctypes.data, locked.nbytes, stream)
            self.finish(device, stream)

    def read(self, address: int, values: NDArray[Any], device: int, stream: int) -> None:
        """Copy values from device memory, after the work already enqueued on `stream`."""
        for piece, locked, place in self._pieces(address, values, device):
            self.cuda.copy_to_host(locked.ctypes.data, place, locked.nbytes, stream)
            self.finish(device, stream)
            piece[:] = locked

    def _pieces(
        self, address: int, values: NDArray[Any], device: int
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any], int]]:
        """Yield pieces of an array: its host bytes, page-locked memory of the same size, and the device address."""
        flat = values.reshape(-1).view(np.uint8)
        with self.on(device), self._copying:
            for start in range(0, flat.size, NBYTES):
                piece = flat[start : start + NBYTES]
                yield piece, self._block[: piece.size], address + start

    def finish(self, device: int, stream: int) -> None:
        """Wait until the work on a stream is done."""
        with self.on(device):
            event = self.cuda.event_create(sleeps=True)
            try:
                self.cuda.event_record(event, stream)
                self.cuda.event_synchronize(event)
            finally:
                self.cuda.event_destroy(event)

    def launch(self, name: str, blocks: int, threads: int, device: int, stream: int, *arguments: Any) -> None:
        """Launch the named kernel on a stream with ctypes objects as arguments."""
        with self.on(device):
            kernel = self._kernel(name, device)
            given = (_POINTER * len(arguments))(*map(ctypes.addressof, arguments))
            self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, given, None)

    @contextmanager
    def capturing(self, device: int, stream: int) -> Iterator[None]:
        """Capture a stream into a graph during a ``with`` block; raise an error if the capture was invalidated."""
        graph = ctypes.c_void_p()
        with self.on(device):
            self._call("cuStreamBeginCapture_v2", stream, _GLOBAL)
            try:
                yield
            finally:
                self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
            self._call("cuGraphDestroy", graph)

    def _kernel(self, name: str, device: int) -> ctypes.c_void_p:
        if (device, name) not in self._kernels:
            module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), KERNELS)
            self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
            self._kernels[device, name] = kernel
        return self._kernels[device, name]

    def _call(self, name: str, *args: Any) -> None:
        if status := self._calls[name](*args):
            raise OSError(f"{name}: libcuda returned status {status}")
