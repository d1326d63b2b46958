"""Devices that the same tests run on: those that are played, always, and real ones, with arrays of CuPy or of torch.

fake      our own calls of CUDA and NCCL are played
played    a machine with torch and without CuPy is: driver, NCCL and torch are looked for and called as there
cupy      real, with CuPy's arrays
torch     real, with torch's tensors; CUDA and NCCL by CuPy, or without it by the libraries that torch brings
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from aiocoll import BackendUnavailableError
from aiocoll.gpu.device import close_devices
from aiocoll.gpu.provider import by_ctypes, missing_nccl_reason, provide, runtime
from aiocoll.testing.skips import _gpus

from ...fakes.nccl import FakeNccl
from ..groups import gpus, join_threads
from ..kinds import ADAPTER, PLAYED, REAL
from ..played import machine
from .base import World
from .fake import Fake
from .far_nccl import FarNccl
from .real import OfCupy, OfTorch, Played

__all__ = ["PLAYED", "REAL", "World", "missing", "ranks", "world"]

_WORLDS = {"played": Played, "cupy": OfCupy, "torch": OfTorch}


def missing(kind: str) -> str | None:
    """Return why there are no such devices here."""
    if kind in PLAYED:
        return None
    if not _gpus():
        return "there is no CUDA device"
    try:
        library = importlib.import_module(kind)
    except ImportError as error:
        return f"needs {kind}: {error}"
    try:
        runtime()
    except BackendUnavailableError as error:
        return str(error)
    if kind == "torch" and not library.cuda.is_available():
        return "torch finds no CUDA device"
    return None


@contextmanager
def world(
    kind: str, way: str = "nccl", devices: int = 1, *, stuck: bool = False, processes: bool = False
) -> Iterator[World]:
    """Provide devices, and NCCL, if that is the way.

    Args:
        kind: of devices.
        way: "nccl" or "staged".
        devices: how many are played; of real ones there are all.
        stuck: a thread may be left at the end, which nothing but a fake can let go.
        processes: two ranks that are processes share the device, so NCCL is played by both.
    """
    library = FarNccl if processes else FakeNccl
    if kind == "fake":
        with gpus(devices, way, library) as gpu:
            yield Fake(gpu, devices)
        return
    with ExitStack() as played:
        if kind == "played":
            played.enter_context(machine(devices, library))
        cuda, nccl, lacking = (
            by_ctypes() if os.environ.get(ADAPTER) == "ctypes" else (*runtime(), missing_nccl_reason())
        )
        made = _WORLDS[kind]()
        try:
            with provide(cuda, nccl if way == "nccl" else None, lacking or "it was left out"):
                yield made
        finally:
            made.leave()
            ended = close_devices(0.1 if stuck else 30.0)
            if not stuck:
                assert ended, "a thread of a device is stuck"
                join_threads()


def ranks(made: World, way: str, wanted: int) -> int:
    """Return how many ranks there can be: NCCL wants a device for each."""
    return min(wanted, made.devices) if way == "nccl" else wanted
