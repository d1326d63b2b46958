"""The memory of a fake CUDA: blocks of host memory, each owned by a device or by the host."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The owner of page-locked host memory. Devices have numbers from 0.
HOST = -1


class BadAddressError(Exception):
    """An error for an address that is not in usable memory."""


class _Block(NamedTuple):
    nbytes: int
    where: int
    bytes: weakref.ref[NDArray[Any]]


class FakeMemory:
    """A table of the memory blocks of a fake CUDA, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._blocks: dict[int, _Block] = {}
        # Addresses of freed blocks. A finalizer may run while the lock is held, so it only appends to this queue.
        self._gone: deque[int] = deque()

    def new(self, nbytes: int, where: int) -> NDArray[Any]:
        """Allocate `nbytes` of memory for device `where` or `HOST`; deleting the returned array frees the memory."""
        made = np.empty(nbytes, np.uint8)
        if nbytes:
            base = made.ctypes.data
            with self._lock:
                self._sweep()
                self._blocks[base] = _Block(nbytes, where, weakref.ref(made))
                insort(self._bases, base)
            # The finalizer runs before NumPy releases the memory, so a new block with this address is registered only
            # later.
            weakref.finalize(made, self._gone.append, base).atexit = False
        return made

    def _sweep(self) -> None:
        """Remove freed blocks from the table; the caller holds the lock."""
        while self._gone:
            base = self._gone.popleft()
            del self._blocks[base]
            self._bases.remove(base)

    def _found(self, address: int) -> tuple[int, _Block | None]:
        """Return the block with the highest start address up to `address`, and this start address."""
        with self._lock:
            self._sweep()
            place = bisect_right(self._bases, address) - 1
            if place < 0:
                return 0, None
            base = self._bases[place]
            return base, self._blocks[base]

    def at(self, address: int, nbytes: int, where: int) -> NDArray[Any]:
        """Return a range of memory as a byte array.

        Raises:
            BadAddressError: the range is not inside one live block of `where`.
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
        """Return the device, or `HOST`, that owns the memory at `address`.

        Raises:
            BadAddressError: no live block contains the address.
        """
        base, block = self._found(address)
        if block is None or address >= base + block.nbytes:
            raise BadAddressError(f"{address:#x} is in no live allocation")
        return block.where

    def live(self, where: int) -> int:
        """Return the number of allocated bytes of a device, or of the host."""
        with self._lock:
            self._sweep()
            return sum(block.nbytes for block in self._blocks.values() if block.where == where)


def _place(where: int) -> str:
    return "the host" if where == HOST else f"device {where}"
