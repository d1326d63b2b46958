"""Fake libcuda, libnccl and CuPy that call the fake CUDA and NCCL, so that tests run through the real adapters.

The libnccl has non-blocking communicators: its calls return unfinished, and the first status query after a call reports
the same.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.ctypes_cuda import CtypesCuda
from aiocoll.gpu.ctypes_nccl import Config, CtypesNccl
from aiocoll.gpu.driver import Driver

from ..fakes.cuda import FakeCuda
from . import stub_cupy
from .device_kinds import ADAPTER
from .simulated_kernels import kernel_functions
from .stub_driver import CONTEXT, Pointer, write_number
from .stub_libraries import CUDA_H, LAUNCH_H, NCCL_H, RAW_H, ctypes_of

#: C signatures of the cuda.h functions that `Driver` calls.
DRIVER_H = {
    "cuInit": "unsigned int Flags",
    "cuEventQuery": "CUevent hEvent",
    "cuStreamWriteValue32_v2": "CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags",
    "cuDeviceGet": "CUdevice *device, int ordinal",
    "cuDevicePrimaryCtxGetState": "CUdevice dev, unsigned int *flags, int *active",
    "cuDevicePrimaryCtxRetain": "CUcontext *pctx, CUdevice dev",
    "cuCtxSetCurrent": "CUdeviceptr ctx",
    "cuPointerGetAttribute": "void **data, int attribute, CUdeviceptr ptr",
    "cuThreadExchangeStreamCaptureMode": "CUstreamCaptureMode *mode",
    "cuGetErrorName": "int error, const char **pStr",
}
SUCCESS, REFUSED, NOT_READY, FAILED = 0, 1, 600, 719
IN_PROGRESS, NCCL_FAILED, NCCL_REFUSED = 7, 1, 4
#: The CUDA event flag (blocking sync) with which waiting threads sleep instead of spinning.
_SLEEPS = 1
_MAJOR = 75
_WIDE = ctypes.c_uint64
_NAME = ctypes.create_string_buffer(b"CUDA_ERROR_OF_A_FAKE")


def _library(
    headers: dict[str, str], functions: dict[str, Callable[..., int | None]], refused: int, failed: int
) -> Any:
    """Return a C library whose functions call `functions`; a `DeviceError` becomes an error status."""

    def function(name: str) -> Any:
        call = functions[name]

        def call_function(*args: Any) -> int:
            try:
                return call(*args) or SUCCESS
            except DeviceError as error:
                return error.status or (failed if error.fatal else refused)

        return ctypes.CFUNCTYPE(ctypes.c_int, *ctypes_of(headers[name]))(call_function)

    return SimpleNamespace(**{name: function(name) for name in headers})


def libcuda(cuda: FakeCuda) -> Any:
    """Return a fake libcuda whose functions call a `FakeCuda`."""
    locked: dict[int, Any] = {}

    def lock(where: Pointer, nbytes: int, flags: int) -> None:
        made = cuda.pinned(nbytes)
        locked[made.ctypes.data] = made
        write_number(where, made.ctypes.data, _WIDE)

    functions: dict[str, Callable[..., int | None]] = {
        "cuInit": lambda flags: None,
        "cuEventQuery": lambda event: SUCCESS if cuda.event_done(event) else NOT_READY,
        "cuStreamWriteValue32_v2": lambda stream, address, value, flags: cuda.stream_write(stream, address, value),
        "cuDeviceGet": write_number,
        "cuDevicePrimaryCtxGetState": lambda device, flags, active: write_number(active, cuda.has_context(device)),
        "cuDevicePrimaryCtxRetain": lambda where, device: write_number(where, CONTEXT + device, _WIDE),
        "cuCtxSetCurrent": lambda context: cuda.use(context - CONTEXT),
        "cuPointerGetAttribute": lambda where, attribute, address: write_number(where, cuda.device_of(address)),
        "cuThreadExchangeStreamCaptureMode": lambda where: cuda.relax(),
        "cuGetErrorName": lambda status, where: write_number(where, ctypes.addressof(_NAME), _WIDE),
        "cuDriverGetVersion": lambda where: write_number(where, cuda.version()),
        "cuDeviceGetCount": lambda where: write_number(where, cuda.device_count()),
        "cuDeviceGetPCIBusId": lambda where, size, device: _write(where, cuda.bus_id(device).encode()),
        "cuDeviceGetAttribute": lambda where, which, device: write_number(
            where, cuda.capability(device)[which - _MAJOR]
        ),
        "cuCtxGetDevice": lambda where: write_number(where, cuda.current()),
        "cuStreamCreate": lambda where, flags: write_number(where, cuda.stream_create(), _WIDE),
        "cuStreamDestroy_v2": cuda.stream_destroy,
        "cuStreamIsCapturing": lambda stream, where: write_number(where, cuda.is_capturing(stream)),
        "cuStreamWaitEvent": lambda stream, event, flags: cuda.stream_wait(stream, event),
        "cuEventCreate": lambda where, flags: write_number(where, cuda.event_create(bool(flags & _SLEEPS)), _WIDE),
        "cuEventDestroy_v2": cuda.event_destroy,
        "cuEventRecord": cuda.event_record,
        "cuEventSynchronize": cuda.event_synchronize,
        "cuMemHostAlloc": lock,
        "cuMemFreeHost": lambda address: locked.pop(address) is None,
        "cuMemcpyDtoHAsync_v2": cuda.copy_to_host,
        "cuMemcpyHtoDAsync_v2": cuda.copy_to_device,
        "cuMemcpyDtoDAsync_v2": cuda.copy,
        "cuMemAllocAsync": lambda where, nbytes, stream: write_number(where, cuda.scratch(nbytes, stream), _WIDE),
        "cuMemFreeAsync": cuda.scratch_free,
        **kernel_functions(cuda),
    }
    return _library({**DRIVER_H, **CUDA_H, **LAUNCH_H}, functions, REFUSED, FAILED)


def _write(where: Pointer, text: bytes) -> None:
    ctypes.memmove(where.value or 0, text + b"\0", len(text) + 1)


class _Communicator:
    """A communicator of the fake libnccl for one rank, which reports calls in progress as NCCL does.

    A thread creates and finalizes a nonblocking communicator. Its other calls have finished when they return, but the
    next status is still "in progress". The calls of a blocking communicator have finished when they return.

    Attributes:
        made: the communicator of the fake, once it was created.
        is_blocking: whether the communicator is blocking.
        thread: the thread that runs `begin`'s call.
        failed: whether that call has failed.
        unfinished: number of further statuses that are "in progress".
    """

    def __init__(self, made: Any = None) -> None:
        self.made = made
        self.is_blocking = made is not None
        self.thread: threading.Thread | None = None
        self.failed = False
        self.unfinished = 0

    def begin(self, call: Callable[[], object]) -> int:
        def run_call() -> None:
            try:
                call()
            except DeviceError:
                self.failed = True

        self.thread = threading.Thread(target=run_call, daemon=True, name="fake-nccl")
        self.thread.start()
        return IN_PROGRESS

    def status(self) -> int:
        if self.unfinished or (self.thread is not None and self.thread.is_alive()):
            self.unfinished = max(0, self.unfinished - 1)
            return IN_PROGRESS
        return NCCL_FAILED if self.failed or (self.made is not None and self.made.async_error()) else SUCCESS


def libnccl(cuda: FakeCuda, nccl: Any) -> Any:
    """Return a fake libnccl whose functions call a `FakeNccl` or a `FarNccl`."""
    communicators: dict[int, _Communicator] = {}
    handles = itertools.count(0x7F00_0000_0000, 0x100)

    def init(where: Pointer, size: int, identity: Any, rank: int, config: Pointer) -> int:
        assert Config.from_address(config.value or 0).blocking == 0
        handle, device, name = next(handles), cuda.current(), bytes(memoryview(identity))
        communicator = communicators[handle] = _Communicator()
        write_number(where, handle, _WIDE)

        def make() -> None:
            cuda.use(device)
            communicator.made = nccl.init(size, name, rank)

        return communicator.begin(make)

    def init_blocking(where: Pointer, size: int, identity: Any, rank: int) -> None:
        handle = next(handles)
        communicators[handle] = _Communicator(nccl.init(size, bytes(memoryview(identity)), rank))
        write_number(where, handle, _WIDE)

    def call(name: str) -> Callable[..., int]:
        def call_function(*args: int) -> int:
            *first, handle, stream = args
            getattr(communicators[handle].made, name)(*first, stream)
            if communicators[handle].is_blocking:
                return SUCCESS
            communicators[handle].unfinished = 1
            return IN_PROGRESS

        return call_function

    def finalize(handle: int) -> int:
        made, communicators[handle].made = communicators[handle].made, None
        return communicators[handle].begin(made.destroy)

    def destroy(handle: int) -> None:
        if (made := communicators.pop(handle).made) is not None:
            made.destroy()

    def abort(handle: int) -> None:
        if (made := communicators.pop(handle).made) is not None:
            made.abort()

    functions: dict[str, Callable[..., int | None]] = {
        "ncclGetVersion": lambda where: write_number(where, nccl.version()),
        "ncclGetUniqueId": lambda where: ctypes.memmove(where.value or 0, nccl.unique_id(), 128) and None,
        "ncclCommInitRankConfig": init,
        "ncclCommGetAsyncError": lambda handle, where: write_number(where, communicators[handle].status()),
        "ncclCommFinalize": finalize,
        "ncclCommInitRank": init_blocking,
        "ncclCommDestroy": destroy,
        "ncclCommAbort": abort,
        "ncclAllReduce": call("all_reduce"),
        "ncclReduce": call("reduce"),
        "ncclBroadcast": call("broadcast"),
        "ncclAllGather": call("all_gather"),
        "ncclReduceScatter": call("reduce_scatter"),
        "ncclSend": call("send"),
        "ncclRecv": call("recv"),
        "ncclGroupStart": lambda: nccl.group_start(),
        "ncclGroupEnd": lambda: nccl.group_end(),
    }
    library = _library({**NCCL_H, **RAW_H}, functions, NCCL_REFUSED, NCCL_FAILED)
    library.ncclGetErrorString = _Text()
    return library


class _Text:
    """A C function that returns the text of an NCCL error status."""

    def __call__(self, status: int) -> bytes:
        return b"status %d of a fake" % status


class _Cuda(CtypesCuda):
    """A ctypes adapter with the kernels of the fake CUDA, since the adapter's own kernels need torch."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(libcuda(cuda))
        self.kernels = cuda.kernels


class _FakeLog(stub_cupy.Log):
    """A log of CuPy calls that passes the calls on to the fake CUDA and NCCL."""

    def __init__(self, cuda: FakeCuda, nccl: Any) -> None:
        super().__init__()
        self._functions: dict[str, Callable[..., Any]] = {
            "runtimeGetVersion": cuda.version,
            "getDeviceCount": cuda.device_count,
            "deviceGetPCIBusId": cuda.bus_id,
            "deviceGetAttribute": lambda which, device: cuda.capability(device)[which - _MAJOR],
            "getDevice": cuda.current,
            "streamCreateWithFlags": lambda flags: cuda.stream_create(),
            "streamDestroy": cuda.stream_destroy,
            "streamIsCapturing": cuda.is_capturing,
            "eventCreateWithFlags": lambda flags: cuda.event_create(bool(flags & _SLEEPS)),
            "eventDestroy": cuda.event_destroy,
            "eventRecord": cuda.event_record,
            "eventSynchronize": cuda.event_synchronize,
            "streamWaitEvent": cuda.stream_wait,
            "memcpyAsync": lambda target, source, nbytes, kind, stream: {
                1: cuda.copy_to_device,
                2: cuda.copy_to_host,
                3: cuda.copy,
            }[kind](target, source, nbytes, stream),
            "mallocAsync": cuda.scratch,
            "freeAsync": cuda.scratch_free,
            "get_version": lambda: nccl.version(),
            "get_unique_id": lambda: nccl.unique_id(),
            "groupStart": lambda: nccl.group_start(),
            "groupEnd": lambda: nccl.group_end(),
        }

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        kind = stub_cupy.NcclError if name.startswith(("get_", "group")) else stub_cupy.CUDARuntimeError
        with _cupy_errors(kind):
            return self._functions[name](*args)


@contextmanager
def _cupy_errors(kind: Callable[[int], Exception]) -> Iterator[None]:
    """Raise each `DeviceError` of the fakes as the corresponding CuPy error."""
    try:
        yield
    except DeviceError as error:
        nccl = kind is stub_cupy.NcclError
        refused, failed = (NCCL_REFUSED, NCCL_FAILED) if nccl else (REFUSED, FAILED)
        raise kind(error.status or (failed if error.fatal else refused)) from error


def _cupy(cuda: FakeCuda, nccl: Any) -> tuple[Any, Any]:
    """Return CUDA and NCCL adapters from `aiocoll.gpu.cupy_api` with a CuPy that calls the fakes."""

    class Pinned:
        def __init__(self, size: int) -> None:
            with _cupy_errors(stub_cupy.CUDARuntimeError):
                self.bytes = cuda.pinned(size)

    class Communicator:
        def __init__(self, size: int, identity: bytes, rank: int) -> None:
            with _cupy_errors(stub_cupy.NcclError):
                self._end = nccl.init(size, identity, rank)

        def check_async_error(self) -> None:
            if self._end.async_error():
                raise stub_cupy.NcclError(NCCL_FAILED)

    def method(name: str) -> Callable[..., None]:
        def call_function(self: Any, *args: Any) -> None:
            with _cupy_errors(stub_cupy.NcclError):
                getattr(self._end, name)(*args)

        return call_function

    for name in ("allReduce", "reduce", "broadcast", "allGather", "reduceScatter", "send", "recv", "abort", "destroy"):
        own_name = "".join(f"_{each.lower()}" if each.isupper() else each for each in name)
        setattr(Communicator, name, method(own_name))
    modules = stub_cupy.stub(_FakeLog(cuda, nccl))
    where: Any = modules["cupy.cuda"]
    where.PinnedMemory, where.PinnedMemoryPointer = Pinned, lambda memory, offset: memory.bytes.data
    where.nccl = modules["cupy.cuda.nccl"]
    where.nccl.NcclCommunicator = Communicator
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        stub_cupy.unload_cupy_api()
        from aiocoll.gpu import cupy_api

        cupy_api.load = lambda: Driver(libcuda(cuda))  # type: ignore[attr-defined]
        made = cupy_api.cuda()
        made.kernels = cuda.kernels
        return made, cupy_api.nccl()[0]
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        stub_cupy.unload_cupy_api()


def select_adapter(cuda: FakeCuda, nccl: Any) -> tuple[Any, Any]:
    """Return CUDA and NCCL through the adapter in the variable `ADAPTER`, or plain fakes if `ADAPTER` is unset."""
    name = os.environ.get(ADAPTER)
    if name is None:
        return cuda, nccl
    if name == "cupy":
        return _cupy(cuda, nccl)
    return _Cuda(cuda), CtypesNccl(libnccl(cuda, nccl))
