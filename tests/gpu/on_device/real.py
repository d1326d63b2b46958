"""Real devices for the on-device tests: CuPy or torch makes arrays and streams, the CUDA driver does the rest."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from itertools import cycle
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...reductions import DTYPES, numpy_dtype
from .base import Gate, World
from .direct import Direct

#: Dtypes that CuPy does not support.
NARROW = frozenset(name for name in DTYPES if not hasattr(np, name) and name != "bool")
#: The maximum time in seconds that a kernel waits for its gate, so that a failed test does not block the device.
SHUT = 20.0
#: The number of gate flags, which limits the gates in use. Flag 0 is never set: its kernel is a pure delay.
FLAGS = 64


class _Flag(NamedTuple):
    """A gate: a number in page-locked memory that a waiting kernel polls."""

    flags: NDArray[np.int32]
    place: int

    def open(self) -> None:
        self.flags[self.place] = 1


class RealWorld(World):
    """A base class for machines with real devices; each array library has a subclass."""

    slow = 1.0

    def __init__(self, kind: str, library: ModuleType, dtypes: frozenset[str]) -> None:
        self.kind, self.library, self.dtypes = kind, library, dtypes
        self.direct = Direct(ctypes.CDLL("libcuda.so.1"))
        self.devices = self.direct.cuda.device_count()
        with self.direct.on(0):
            self._flags = self.direct.cuda.pinned(FLAGS * 4).view(np.int32)
        self._flags[:] = 0
        self._places = cycle(range(1, FLAGS))
        for device in range(self.devices):  # load the kernels now, since CUDA may wait for running kernels
            self.delay(0.0, device)
            warm = self.tensor(np.zeros(1), device)
            self.add(warm, 1.0)
            assert self.host(warm).tolist() == [1]

    def tensor(self, values: Any, device: int = 0) -> Any:
        array = np.ascontiguousarray(values).reshape(-1)
        made = self.empty(array.size, array.dtype.name, device)
        if array.size:
            self.direct.write(self.address(made), array, device, self.current(device))
        return made

    def part(self, tensor: Any, start: int, stop: int) -> Any:
        return tensor[start:stop]

    def host(self, tensor: Any) -> NDArray[Any]:
        device = self.device(tensor)
        made = np.empty(self.count(tensor), numpy_dtype(str(tensor.dtype).removeprefix("torch.")))
        if made.size:
            self.direct.read(self.address(tensor), made, device, self.current(device))
        return made

    def add(self, tensor: Any, number: float) -> None:
        device = self.device(tensor)
        address, count = ctypes.c_uint64(self.address(tensor)), ctypes.c_uint64(self.count(tensor))
        self.direct.launch("add", 64, 256, device, self.current(device), address, ctypes.c_double(number), count)

    def delay(self, seconds: float, device: int) -> None:
        self._hold(0, seconds, device)

    def gate(self, device: int) -> Gate:
        place = next(self._places)
        self._flags[place] = 0
        self._hold(place, SHUT, device)
        return _Flag(self._flags, place)

    def _hold(self, place: int, seconds: float, device: int) -> None:
        flag = ctypes.c_uint64(self._flags[place:].ctypes.data)
        self.direct.launch("until", 1, 1, device, self.current(device), flag, ctypes.c_uint64(int(seconds * 1e9)))

    def capturing(self, device: int) -> AbstractContextManager[None]:
        return self.direct.capturing(device, self.current(device))

    def finish(self, device: int) -> None:
        """Wait until the work on the current stream of a device is done."""
        self.direct.finish(device, self.current(device))

    def leave(self) -> None:
        """Make the default streams current again on all devices."""
        for device in range(self.devices):
            self.default_stream(device, False)

    # -- methods that subclasses implement

    def empty(self, count: int, dtype: str, device: int) -> Any:
        """Return a new uninitialized array."""
        raise NotImplementedError

    def address(self, tensor: Any) -> int:
        """Return the device address of an array."""
        raise NotImplementedError

    def device(self, tensor: Any) -> int:
        """Return the device number of an array."""
        raise NotImplementedError

    def count(self, tensor: Any) -> int:
        """Return the number of elements of an array."""
        raise NotImplementedError


class CupyWorld(RealWorld):
    """A machine with real devices and CuPy arrays."""

    def __init__(self) -> None:
        import cupy

        self._streams: list[Any] = []  # referenced, since CuPy destroys an unreferenced stream, even the current stream
        super().__init__("cupy", cupy, frozenset(DTYPES) - NARROW)

    def empty(self, count: int, dtype: str, device: int) -> Any:
        with self.library.cuda.Device(device):
            return self.library.empty((count,), dtype)

    def stream(self, device: int) -> Any:
        with self.library.cuda.Device(device):
            made = self.library.cuda.Stream(non_blocking=True)
            made.use()
        self._streams.append(made)
        return made

    def current(self, device: int) -> int:
        return int(self.library.cuda.get_current_stream(device).ptr)

    def default_stream(self, device: int, per_thread: bool) -> None:
        streams = self.library.cuda.Stream
        with self.library.cuda.Device(device):
            (streams.ptds if per_thread else streams.null).use()

    def poke(self, device: int) -> None:
        with self.library.cuda.Device(device):
            event = self.library.cuda.Event(disable_timing=True)
            event.record(self.library.cuda.Stream.null)
            _ = event.done

    def address(self, tensor: Any) -> int:
        return int(tensor.data.ptr)

    def device(self, tensor: Any) -> int:
        return int(tensor.device.id)

    def count(self, tensor: Any) -> int:
        return int(tensor.size)


class TorchWorld(RealWorld):
    """A machine with real devices and torch tensors."""

    def __init__(self, kind: str = "torch") -> None:
        import torch

        super().__init__(kind, torch, frozenset(name for name in DTYPES if hasattr(torch, name)))

    def empty(self, count: int, dtype: str, device: int) -> Any:
        return self.library.empty((count,), dtype=getattr(self.library, dtype), device=f"cuda:{device}")

    def stream(self, device: int) -> Any:
        made = self.library.cuda.Stream(device=device)
        self.library.cuda.set_stream(made)
        return made

    def current(self, device: int) -> int:
        return int(self.library.cuda.current_stream(device).cuda_stream)

    def default_stream(self, device: int, per_thread: bool) -> None:
        assert not per_thread, "torch does not use the default streams of threads"
        self.library.cuda.set_stream(self.library.cuda.default_stream(device))

    def poke(self, device: int) -> None:
        with self.library.cuda.device(device):
            mark = self.library.cuda.Event()
            mark.record()
            mark.query()

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def device(self, tensor: Any) -> int:
        return int(tensor.get_device())

    def count(self, tensor: Any) -> int:
        return int(tensor.numel())


class SimulatedWorld(TorchWorld):
    """A simulated machine with torch but not CuPy; see `..simulated_machine`."""

    slow = 0.3

    def __init__(self) -> None:
        super().__init__("simulated")
