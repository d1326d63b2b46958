"""Implementations of `Cuda` and `Nccl` by CuPy. No other module imports CuPy.

Peculiarities of CuPy:

- Importing its NCCL module without the library warns and leaves an empty module.
- An NCCL status that CuPy does not know raises KeyError.
- Garbage collection of a communicator destroys it, for which NCCL waits for other ranks.
- Some calls hold the GIL while they wait for the driver. `aiocoll.gpu.driver` makes those.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu.api import Cuda, DeviceError, Kernels, Nccl
from aiocoll.gpu.driver import HARMLESS, Driver, load

__all__ = ["cuda", "nccl"]

P = ParamSpec("P")
T = TypeVar("T")

_OLDEST = 14
_INVALID_ARGUMENT = 4
#: Numbers of the CUDA device attributes for the major and minor compute capability, which CuPy does not name.
_CAPABILITY = (75, 76)
_IN_PROGRESS = 7
#: Error texts for NCCL status codes that CuPy does not know.
_UNKNOWN = {_IN_PROGRESS: "in progress: CuPy does not support NCCL_COMM_BLOCKING=0", 8: "it took too long"}
#: CUDA code for scaling float16, which CuPy rounds differently, and bfloat16, which CuPy lacks.
_SCALE = {
    "float16": ("float16", "y = (float)x * f"),
    "bfloat16": (
        "uint16",
        "float product = __uint_as_float((unsigned)x << 16) * f;"
        "unsigned bits = __float_as_uint(product);"
        "y = product != product ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
    ),
}
_SCALED = ("float32", "float64", "complex64", "complex128")

if int(cupy.__version__.partition(".")[0]) < _OLDEST:
    raise ImportError(f"CuPy {cupy.__version__} is too old; install version {_OLDEST} or later")


def _error(call: str, error: Exception, fatal: bool) -> DeviceError:
    """Convert an exception of CuPy to a `DeviceError` that names the failed `call`."""
    if isinstance(error, KeyError):
        # CuPy raises KeyError for an NCCL status code that it does not know.
        status = error.args[0]
        return DeviceError(call, _UNKNOWN.get(status, f"status {status}"))
    number = getattr(error, "status", None)
    if isinstance(error, runtime.CUDARuntimeError):
        fatal = fatal or number not in HARMLESS
    else:
        fatal = fatal or number != _INVALID_ARGUMENT
    return DeviceError(call, str(error), fatal=fatal, status=number or 0)


def _named(call: str, *, fatal: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that converts CuPy's exceptions to a `DeviceError` that names `call`."""

    def named(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def made(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (KeyError, RuntimeError) as error:
                raise _error(call, error, fatal) from error

        return made

    return named


class _StreamAddress:
    """A CUDA stream address wrapped in the ``__cuda_stream__`` protocol, so that CuPy can use the stream."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


class _Kernels:
    """An implementation of `Kernels` by CuPy."""

    def scale(self, target: int, source: int, count: int, dtype: str, factor: complex, stream: int) -> None:
        if dtype not in _SCALE and dtype not in _SCALED:
            raise DeviceError("scale", f"{dtype} cannot be multiplied on a device", fatal=False)
        try:
            with cupy.cuda.Stream.from_external(_StreamAddress(stream)):
                _scaled(target, source, count, dtype, factor)
        except Exception as error:  # compiling may raise any exception, such as ImportError without NVRTC
            raise DeviceError("scale", str(error), fatal=False) from error


class _Cuda:
    """An implementation of `Cuda` by CuPy; by the driver where CuPy holds the GIL or creates a CUDA context."""

    # Bind CuPy's functions directly, without a method around them, because every collective calls them.
    current = staticmethod(_named("cudaGetDevice")(runtime.getDevice))
    is_capturing = staticmethod(_named("cudaStreamIsCapturing")(runtime.streamIsCapturing))
    event_record = staticmethod(_named("cudaEventRecord")(runtime.eventRecord))
    stream_wait = staticmethod(_named("cudaStreamWaitEvent")(runtime.streamWaitEvent))

    def __init__(self, driver: Driver) -> None:
        self.use = driver.use
        self.has_context = driver.has_context
        self.relax = driver.relax
        self.device_of = driver.device_of
        self.event_done = driver.event_done
        self.stream_write = driver.stream_write
        self.kernels: Kernels = _Kernels()

    @_named("cudaRuntimeGetVersion")
    def version(self) -> int:
        return int(runtime.runtimeGetVersion())

    def device_count(self) -> int:
        try:
            return int(runtime.getDeviceCount())
        except runtime.CUDARuntimeError:
            return 0

    @_named("cudaDeviceGetPCIBusId")
    def bus_id(self, device: int) -> str:
        return str(runtime.deviceGetPCIBusId(device))

    @_named("cudaDeviceGetAttribute")
    def capability(self, device: int) -> tuple[int, int]:
        major, minor = (int(runtime.deviceGetAttribute(attribute, device)) for attribute in _CAPABILITY)
        return major, minor

    @_named("cudaStreamCreateWithFlags")
    def stream_create(self) -> int:
        return int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))

    @_named("cudaStreamDestroy")
    def stream_destroy(self, stream: int) -> None:
        runtime.streamDestroy(stream)

    @_named("cudaEventCreateWithFlags")
    def event_create(self, sleeps: bool = False) -> int:
        flags = runtime.eventDisableTiming | (runtime.eventBlockingSync if sleeps else 0)
        return int(runtime.eventCreateWithFlags(flags))

    @_named("cudaEventDestroy")
    def event_destroy(self, event: int) -> None:
        runtime.eventDestroy(event)

    @_named("cudaEventSynchronize")
    def event_synchronize(self, event: int) -> None:
        runtime.eventSynchronize(event)

    @_named("cudaHostAlloc")
    def pinned(self, nbytes: int) -> NDArray[Any]:
        if not nbytes:
            return np.empty(0, np.uint8)
        # Do not allocate from CuPy's memory pool, which would never free the memory. The array owns this pointer, which
        # owns the memory.
        pointer = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
        return np.frombuffer(pointer, np.uint8, nbytes)

    @_named("cudaMemcpyAsync")
    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToHost, stream)

    @_named("cudaMemcpyAsync")
    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, stream)

    @_named("cudaMemcpyAsync")
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    @_named("cudaMallocAsync")
    def scratch(self, nbytes: int, stream: int) -> int:
        return int(runtime.mallocAsync(nbytes, stream))

    @_named("cudaFreeAsync")
    def scratch_free(self, address: int, stream: int) -> None:
        runtime.freeAsync(address, stream)


class _Communicator:
    """An implementation of `NcclCommunicator` by CuPy.

    An extra reference keeps CuPy's communicator object alive until `_end`.
    """

    def __init__(self, made: Any) -> None:
        self._made = made
        self._ending = threading.Lock()
        self._ended = False
        self.all_reduce = _named("ncclAllReduce")(made.allReduce)
        self.reduce = _named("ncclReduce")(made.reduce)
        self.broadcast = _named("ncclBroadcast")(made.broadcast)
        self.all_gather = _named("ncclAllGather")(made.allGather)
        self.reduce_scatter = _named("ncclReduceScatter")(made.reduceScatter)
        self.send = _named("ncclSend")(made.send)
        self.recv = _named("ncclRecv")(made.recv)

    def async_error(self) -> str | None:
        try:
            self._made.check_async_error()
        except KeyError as error:
            status = error.args[0]
            return None if status == _IN_PROGRESS else _UNKNOWN.get(status, f"status {status}")
        except RuntimeError as error:
            return str(error)
        return None

    def abort(self) -> None:
        self._end(self._made.abort, "ncclCommAbort")

    def destroy(self) -> None:
        self._end(self._made.destroy, "ncclCommDestroy")

    def _end(self, end: Any, call: str) -> None:
        """Abort or destroy the communicator by `end`, at most once.

        CuPy itself would allow a second call before the first returns.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
        _named(call, fatal=True)(end)()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._made))


class _Nccl:
    """An implementation of `Nccl` by CuPy."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @_named("ncclGetVersion")
    def version(self) -> int:
        return int(self._library.get_version())

    @_named("ncclGetUniqueId")
    def unique_id(self) -> bytes:
        return bytes(self._library.get_unique_id())

    def init(self, world_size: int, unique_id: bytes, rank: int) -> _Communicator:
        if os.environ.get("NCCL_COMM_BLOCKING") == "0":
            raise DeviceError(
                "ncclCommInitRank", "CuPy does not support NCCL_COMM_BLOCKING=0; unset this environment variable"
            )
        kind = self._library.NcclCommunicator
        made = kind.__new__(kind)
        # Add a reference that only `_end` drops, because freeing CuPy's object would destroy the communicator, which
        # may block forever. It also protects a communicator whose creation fails, and which NCCL may still use in part.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        _named("ncclCommInitRank", fatal=True)(made.__init__)(world_size, unique_id, rank)
        return _Communicator(made)

    @_named("ncclGroupStart")
    def group_start(self) -> None:
        self._library.groupStart()

    @_named("ncclGroupEnd", fatal=True)
    def group_end(self) -> None:
        # A failed `groupEnd` is fatal for all communicators of the NCCL group.
        self._library.groupEnd()


@cache
def cuda() -> Cuda:
    """Return the process-wide implementation of `Cuda` by CuPy.

    Raises:
        BackendUnavailableError: there is no device; the message has the reason.
    """
    try:
        runtime.getDeviceCount()
        return _Cuda(load())
    except (runtime.CUDARuntimeError, OSError, DeviceError) as error:
        raise BackendUnavailableError(f"CuPy {cupy.__version__} finds no CUDA device: {error}") from error


@cache
def nccl() -> tuple[Nccl | None, str | None]:
    """Return the implementation of `Nccl` by CuPy and None, or None and the reason why CuPy has no NCCL."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # CuPy's warning contains the reason
        try:
            from cupy.cuda import nccl as library
        except ImportError as error:
            return None, f"CuPy {cupy.__version__} has no NCCL: {error}"
    if not library.available:
        return None, " ".join(" ".join(str(warning.message).split()) for warning in caught) or "NCCL is not available"
    return _Nccl(library), None


def _array(address: int, count: int, dtype: str) -> Any:
    """Return a CuPy array that views memory at `address` on the thread's current device."""
    kind = np.dtype(dtype)
    memory = cupy.cuda.UnownedMemory(address, count * kind.itemsize, None, runtime.getDevice())
    return cupy.ndarray((count,), kind, cupy.cuda.MemoryPointer(memory, 0))


def _scaled(target: int, source: int, count: int, dtype: str, factor: complex) -> None:
    if dtype not in _SCALE:
        number = factor if dtype.startswith("complex") else factor.real
        cupy.multiply(_array(source, count, dtype), number, _array(target, count, dtype))
        return
    shown = _SCALE[dtype][0]
    _scaler(dtype)(_array(source, count, shown), np.float32(factor.real), _array(target, count, shown))


@cache
def _scaler(dtype: str) -> Any:
    shown, code = _SCALE[dtype]
    return cupy.ElementwiseKernel(f"{shown} x, float32 f", f"{shown} y", code, f"aiocoll_scale_{dtype}")
