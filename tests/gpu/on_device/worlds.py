"""The machines on which the on-device tests run: simulated ones, and real ones with arrays of CuPy or torch.

fake        fake CUDA and NCCL, which aiocoll calls without an adapter
simulated   a simulated machine with torch and without CuPy, where aiocoll finds driver, NCCL and torch
cupy        real devices with CuPy's arrays
torch       real devices with torch's tensors; CUDA and NCCL by CuPy, or without it by the libraries that torch brings
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
from ..device_kinds import ADAPTER, REAL, SIMULATED
from ..groups import gpus, join_threads
from ..simulated_machine import torch_machine
from .base import World
from .fake import FakeWorld
from .far_nccl import FarNccl
from .real import CupyWorld, SimulatedWorld, TorchWorld

__all__ = ["REAL", "SIMULATED", "World", "missing", "possible_ranks", "world"]

_WORLDS = {"simulated": SimulatedWorld, "cupy": CupyWorld, "torch": TorchWorld}


def missing(kind: str) -> str | None:
    """Return the reason why this machine has no devices of this kind, or None if the devices exist."""
    if kind in SIMULATED:
        return None
    if not _gpus():
        return "no CUDA device found"
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
    """Yield devices of a kind, and make groups use them in the ``with`` block.

    Args:
        kind: of the devices; see above.
        way: "nccl", or "staged" for a machine without NCCL.
        devices: the number of simulated devices; on a real machine, all are used.
        stuck: whether a device thread may be stuck at the end.
        processes: whether two processes share the simulated device.
    """
    library = FarNccl if processes else FakeNccl
    if kind == "fake":
        with gpus(devices, way, library) as gpu:
            yield FakeWorld(gpu, devices)
        return
    with ExitStack() as simulated:
        if kind == "simulated":
            simulated.enter_context(torch_machine(devices, library))
        by_cupy = os.environ.get(ADAPTER) != "ctypes"
        cuda, nccl, lacking = (*runtime(), missing_nccl_reason()) if by_cupy else by_ctypes()
        made = _WORLDS[kind]()
        try:
            with provide(cuda, nccl if way == "nccl" else None, lacking or "NCCL was not provided"):
                yield made
        finally:
            made.leave()
            ended = close_devices(0.1 if stuck else 30.0)
            if not stuck:
                assert ended, "a thread of a device is stuck"
                join_threads()


def possible_ranks(made: World, way: str, wanted: int) -> int:
    """Return the possible number of ranks up to `wanted`; NCCL needs one device per rank."""
    return min(wanted, made.devices) if way == "nccl" else wanted
