"""Where CUDA and NCCL come from: CuPy, which is loaded on first use; without it, libraries; or what a test provides."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache

from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu.api import Cuda, DeviceError, Nccl

__all__ = ["by_ctypes", "device_count", "driver_devices", "needed", "provide", "runtime", "why_no_nccl"]

#: What a test has provided: CUDA, NCCL or None, and why there is no NCCL.
_provided: tuple[Cuda, Nccl | None, str] | None = None
#: The CUDA versions that there are extras for.
_OLDEST, _NEWEST = 12, 13
_NOT_PROVIDED = "it was left out"


@contextlib.contextmanager
def provide(cuda: Cuda, nccl: Nccl | None = None, missing: str = _NOT_PROVIDED) -> Iterator[None]:
    """Make `runtime` return these in this block, in all threads; `missing` says why there is no NCCL."""
    global _provided
    before, _provided = _provided, (cuda, nccl, missing)
    try:
        yield
    finally:
        _provided = before


def runtime() -> tuple[Cuda, Nccl | None]:
    """Return CUDA, and NCCL if it is there; the same objects at each call.

    Raises:
        BackendUnavailableError: CUDA cannot be used from here; the message says what to install.

    Cost: the first call loads CuPy, which takes 0.2 s and more.
    """
    if _provided is not None:
        return _provided[:2]
    try:
        from aiocoll.gpu.cupy_api import cuda, nccl
    except ImportError as error:
        try:
            return by_ctypes()[:2]
        except (OSError, AttributeError, DeviceError) as other:
            raise BackendUnavailableError(
                f"CUDA arrays need CuPy: {needed()} ({error}; nor is the driver enough: {other})"
            ) from error
    return cuda(), nccl()[0]


def device_count() -> int:
    """Return how many CUDA devices this process may use; CuPy is not loaded."""
    return driver_devices() if _provided is None else _provided[0].device_count()


def driver_devices() -> int:
    """Return how many devices the driver names; 0 without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def why_no_nccl() -> str | None:
    """Return why `runtime` has no NCCL; None if it has. Call `runtime` first."""
    if _provided is not None:
        return _provided[2] if _provided[1] is None else None
    try:
        from aiocoll.gpu.cupy_api import nccl
    except ImportError:
        return by_ctypes()[2]
    return nccl()[1]


@cache
def by_ctypes() -> tuple[Cuda, Nccl | None, str | None]:
    """Return CUDA, NCCL if it is there, and why it is not, over the libraries themselves.

    Raises:
        OSError: there is no driver.
        AttributeError: it lacks a function.
        DeviceError: it cannot be used.
    """
    import ctypes

    from aiocoll.gpu.ctypes_cuda import CtypesCuda
    from aiocoll.gpu.ctypes_nccl import load

    cuda = CtypesCuda(ctypes.CDLL("libcuda.so.1"))
    try:
        return cuda, load(), None
    except (OSError, AttributeError, DeviceError) as error:
        return cuda, None, str(error)


def needed() -> str:
    """Return what to install for the CUDA of this machine."""
    found = _cuda_major()
    if found is None:
        return "pip install aiocoll[cuda12] (or aiocoll[cuda13]; the CUDA version could not be determined)"
    if found < _OLDEST:
        return f"pip install aiocoll[cuda{_OLDEST}], and a newer driver than that of CUDA {found}, which is too old"
    return f"pip install aiocoll[cuda{min(found, _NEWEST)}]"  # builds for an older CUDA run on a newer driver


def _cuda_major() -> int | None:
    """Return the major version of the CUDA that torch uses here, or of the driver; None if there is neither."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    if version:
        return int(version.partition(".")[0])
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    return None if driver.cuDriverGetVersion(ctypes.byref(number)) else number.value // 1000
