"""Memory of a fake CUDA: host memory that knows which device it plays, and arrays in it."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.elements.dtypes import DType, by_name, of_numpy

if TYPE_CHECKING:
    from aiocoll.testing.fake_cuda import FakeCuda

__all__ = ["HOST", "BadAddressError", "FakeArray", "FakeMemory"]

#: Where page-locked memory is; devices are numbers from 0.
HOST = -1
#: What freed memory is filled with.
FREED = 0xDD


class BadAddressError(Exception):
    """Nothing that may be used is there."""


class _Block(NamedTuple):
    nbytes: int
    where: int
    bytes: weakref.ref[NDArray[Any]]


class FakeMemory:
    """All memory of a fake CUDA, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._blocks: dict[int, _Block] = {}
        # Blocks that are gone. A finalizer may run anywhere, also where the lock is held: it does no more than note it.
        self._gone: deque[int] = deque()

    def new(self, nbytes: int, where: int) -> NDArray[Any]:
        """Return `nbytes` of uint8 that belong to device `where`, or to the host, as long as the array lives."""
        made = np.empty(nbytes, np.uint8)
        if nbytes:
            base = made.ctypes.data
            with self._lock:
                self._sweep()
                self._blocks[base] = _Block(nbytes, where, weakref.ref(made))
                insort(self._bases, base)
            # Noted before the memory can be given to anybody else: the array calls it while it still has it.
            weakref.finalize(made, self._gone.append, base).atexit = False
        return made

    def _sweep(self) -> None:
        """Forget the blocks that are gone; with the lock."""
        while self._gone:
            base = self._gone.popleft()
            del self._blocks[base]
            self._bases.remove(base)

    def _found(self, address: int) -> tuple[int, _Block | None]:
        """Return where the block begins that may hold `address`, and the block."""
        with self._lock:
            self._sweep()
            place = bisect_right(self._bases, address) - 1
            if place < 0:
                return 0, None
            base = self._bases[place]
            return base, self._blocks[base]

    def at(self, address: int, nbytes: int, where: int) -> NDArray[Any]:
        """Return the bytes at `address`.

        Raises:
            BadAddressError: they are not, or not all, in one live block there.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        base, block = self._found(address)
        found = block.bytes() if block is not None else None
        if block is None or found is None or address + nbytes > base + block.nbytes:
            raise BadAddressError(f"{nbytes} bytes at {address:#x} are in no live allocation")
        if block.where != where:
            raise BadAddressError(f"{address:#x} is memory of {_place(block.where)}, not of {_place(where)}")
        return found[address - base : address - base + nbytes]

    def where(self, address: int) -> int:
        """Return what the memory at `address` belongs to.

        Raises:
            BadAddressError: to nothing.
        """
        base, block = self._found(address)
        if block is None or address >= base + block.nbytes:
            raise BadAddressError(f"{address:#x} is in no live allocation")
        return block.where

    def live(self, where: int) -> int:
        """Return the bytes that are in use there."""
        with self._lock:
            self._sweep()
            return sum(block.nbytes for block in self._blocks.values() if block.where == where)


def _place(where: int) -> str:
    return "the host" if where == HOST else f"device {where}"


class FakeArray:
    """An array on a fake device, which other libraries see by `__cuda_array_interface__`.

    It is C-contiguous. Its memory goes when the last reference to it does, even if the device still works on it.

    Args:
        cuda: whose device.
        values: what it begins with; of bfloat16 and float8, the bits as unsigned integers.
        device: ordinal.
        dtype: needed where NumPy has none: bfloat16 and float8, or the name of one.
        stream: what `__cuda_array_interface__` tells that the data is ordered by; None: it tells nothing.

    Attributes:
        ptr: address on the device.
    """

    def __init__(
        self, cuda: FakeCuda, values: Any, device: int = 0, dtype: DType | str | None = None, stream: int | None = None
    ) -> None:
        array = np.array(values, order="C")
        self.dtype = by_name(dtype) if isinstance(dtype, str) else dtype or of_numpy(array.dtype)
        if array.dtype != self.dtype.storage:
            raise TypeError(f"{self.dtype.name} is stored as {self.dtype.storage}, not as {array.dtype}")
        self.shape = array.shape
        self.size = array.size
        self.nbytes = array.nbytes
        self.device = device
        self.stream = stream
        self._cuda = cuda
        self._bytes = cuda.allocate(self.nbytes, device)
        self._bytes[:] = array.reshape(-1).view(np.uint8)
        self.ptr = self._bytes.ctypes.data if self.nbytes else 0

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):
            self._bytes.fill(FREED)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        native = self.dtype.name == self.dtype.storage.name
        found = {
            "shape": self.shape,
            "typestr": self.dtype.storage.str if native else f"<V{self.dtype.itemsize}",
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
        }
        return found if self.stream is None else found | {"stream": self.stream}

    def numpy(self, stream: int = 0) -> NDArray[Any]:
        """Return a copy as the host sees it when all that is on `stream` now is done; bits where NumPy has no dtype."""
        self._cuda.stream_synchronize(stream, self.device)
        return self._bytes.view(self.dtype.storage).reshape(self.shape).copy()

    def peek(self) -> NDArray[Any]:
        """Return a copy of what is there at this moment."""
        return self._bytes.view(self.dtype.storage).reshape(self.shape).copy()

    def fill(self, value: Any, stream: int = 0) -> None:
        """Write `value` everywhere, in the order of `stream`."""
        memory, ptr, nbytes, storage, device = self._cuda.memory, self.ptr, self.nbytes, self.dtype.storage, self.device
        self._cuda.kernel(stream, lambda: memory.at(ptr, nbytes, device).view(storage).fill(value), device)

    def __repr__(self) -> str:
        return f"FakeArray(shape={self.shape}, dtype={self.dtype.name}, device={self.device})"
