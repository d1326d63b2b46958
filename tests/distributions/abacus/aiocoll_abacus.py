"""A plugin for the simulated device "abacus", whose memory is host memory: arrays, adapter and backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from aiocoll.plugins import (
    ADAPTER_VERSION,
    DEVICE_VERSION,
    ArrayAdapter,
    Buffer,
    DeviceArray,
    DeviceBackend,
    PlannedCall,
    PreparedCall,
    Registry,
    receive_in_memory,
    send_from_memory,
    serve_device,
    share,
)


class Beads:
    """An array in the memory of an abacus, as programs see it.

    Args:
        memory: contiguous memory of the device, which the host can access.
        device: ordinal of the device.
    """

    def __init__(self, memory: np.ndarray, device: int = 0) -> None:
        self.memory = memory
        self.device = device


class AbacusArray(DeviceArray):
    """An array on an abacus as the engine sees it: flat elements, which the NumPy array `keep` views."""

    __slots__ = ()
    kind = "abacus"
    label = "Abacus"


class BeadsAdapter(ArrayAdapter):
    library = "aiocoll_abacus"
    noun = "beads"
    label = "Abacus"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, Beads)

    def view(self, array: Any, name: str, writable: bool) -> Buffer:
        buffer: Any = share(array.memory, array, name)
        flat = buffer.array
        buffer.array = AbacusArray(flat.ctypes.data, flat.size, buffer.dtype, array.device, 0, flat)
        return buffer


class AbacusCalls:
    """The calls of one group on abacus arrays, which the CPU carries out in host memory."""

    kind = "abacus"

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def check(self, arrays: Sequence[DeviceArray | None]) -> bool:
        return True

    def call(self, call: PlannedCall, at_once: bool) -> PreparedCall:
        call.arrays = [None if each is None else each.keep for each in call.arrays]
        return call

    def batched(self, calls: Sequence[PreparedCall], ordered: bool) -> Any:
        raise AssertionError("all results of `call` are on NumPy arrays")

    def together(self, arrays: Iterable[DeviceArray]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sending(self, array: DeviceArray, dst: int, tag: int, code: int) -> Any:
        return send_from_memory(self._comm, array.keep.view(np.uint8).data, dst, tag, code)

    def receiving(self, array: DeviceArray, src: int | None, tag: int, code: int) -> Any:
        return receive_in_memory(self._comm, array.keep.view(np.uint8).data, src, tag, code)

    async def close(self) -> None:
        pass

    async def release(self) -> None:
        pass


class AbacusBackend:
    """The device backend of the abacus; see `aiocoll.plugins.DeviceBackend`."""

    kind = "abacus"
    label = "Abacus"
    library = "beads"

    def count(self) -> int:
        return 2

    def calls(self, comm: Any, arrays: Sequence[DeviceArray | None], *, forced: bool, ahead: bool) -> AbacusCalls:
        return AbacusCalls(comm)


def register_arrays(adapters: Registry[ArrayAdapter]) -> None:
    adapters.register("aiocoll_abacus", BeadsAdapter(), version=ADAPTER_VERSION)


def register_device(devices: Registry[DeviceBackend]) -> None:
    devices.register("abacus", AbacusBackend(), version=DEVICE_VERSION)
    serve_device("abacus", "beads")
