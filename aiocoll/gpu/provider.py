"""Selection of the CUDA and NCCL implementations: by CuPy, else by ctypes, or the fakes of a test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache

from aiocoll.errors import BackendUnavailableError
from aiocoll.gpu.api import Cuda, DeviceError, Nccl

__all__ = [
    "by_ctypes",
    "device_count",
    "driver_devices",
    "install_command",
    "missing_nccl_reason",
    "provide",
    "runtime",
]

#: The fakes that a test has provided: CUDA, NCCL or None, and the reason if NCCL is None.
_provided: tuple[Cuda, Nccl | None, str] | None = None
#: Oldest and newest CUDA version with an extra of this package, such as `aiocoll[cuda12]`.
_OLDEST, _NEWEST = 12, 13
_NOT_PROVIDED = "NCCL was not provided"


@contextlib.contextmanager
def provide(cuda: Cuda, nccl: Nccl | None = None, missing: str = _NOT_PROVIDED) -> Iterator[None]:
    """Make `runtime` return these fakes inside the ``with`` block, in all threads.

    `missing` is the reason if there is no NCCL.
    """
    global _provided
    before, _provided = _provided, (cuda, nccl, missing)
    try:
        yield
    finally:
        _provided = before


def runtime() -> tuple[Cuda, Nccl | None]:
    """Return the process-wide CUDA and NCCL implementations; NCCL may be None.

    Raises:
        BackendUnavailableError: CUDA cannot be used here; the message names the package to install.

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
                f"CUDA arrays need CuPy: {install_command()} (CuPy: {error}; ctypes: {other})"
            ) from error
    return cuda(), nccl()[0]


def device_count() -> int:
    """Return the number of CUDA devices that this process may use, without loading CuPy."""
    return driver_devices() if _provided is None else _provided[0].device_count()


def driver_devices() -> int:
    """Return the number of devices that the CUDA driver reports; 0 without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def missing_nccl_reason() -> str | None:
    """Return the reason why `runtime` returns no NCCL; None if it returns NCCL. Call `runtime` first."""
    if _provided is not None:
        return _provided[2] if _provided[1] is None else None
    try:
        from aiocoll.gpu.cupy_api import nccl
    except ImportError:
        return by_ctypes()[2]
    return nccl()[1]


@cache
def by_ctypes() -> tuple[Cuda, Nccl | None, str | None]:
    """Return the ctypes implementations of CUDA and NCCL; if NCCL is None, also the reason.

    Raises:
        OSError: there is no driver.
        AttributeError: the driver lacks a function.
        DeviceError: the driver cannot be used.
    """
    import ctypes

    from aiocoll.gpu.ctypes_cuda import CtypesCuda
    from aiocoll.gpu.ctypes_nccl import load

    cuda = CtypesCuda(ctypes.CDLL("libcuda.so.1"))
    try:
        return cuda, load(), None
    except (OSError, AttributeError, DeviceError) as error:
        return cuda, None, str(error)


def install_command() -> str:
    """Return the command that installs CuPy for the CUDA version of this machine."""
    found = _cuda_major()
    if found is None:
        return "pip install aiocoll[cuda12] (or aiocoll[cuda13]; the CUDA version could not be determined)"
    if found < _OLDEST:
        return f"pip install aiocoll[cuda{_OLDEST}], and a newer driver than that of CUDA {found}, which is too old"
    return f"pip install aiocoll[cuda{min(found, _NEWEST)}]"  # builds for an older CUDA run on a newer driver


def _cuda_major() -> int | None:
    """Return the major CUDA version of torch, else of the CUDA driver; None without both."""
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
