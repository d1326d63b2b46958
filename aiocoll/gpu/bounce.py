"""Copies between a device and pageable host memory, for arrays that could not get page-locked memory.

CUDA locks memory, and frees locked memory, only when the kernels on the device have ended: and those of NCCL may wait
for a rank that waits for what is to be copied. So one block is locked before there are such kernels. In a thread of its
own a copy goes through it, piece by piece.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.gpu.api import Cuda

__all__ = ["Bounce"]

#: Size of the page-locked bounce buffer in bytes: enough for nearly the full speed of large copies.
NBYTES = 1 << 20


class Bounce:
    """A page-locked bounce buffer of one device; copies pass through the buffer one after the other.

    Args:
        cuda: the CUDA runtime.

    Raises:
        DeviceError: no memory could be page-locked.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = threading.Lock()
        self._block = cuda.pinned(NBYTES)

    def copy(self, pairs: Sequence[tuple[NDArray[Any], int]], *, to_host: bool) -> None:
        """Copy between host arrays and addresses on the thread's current device; block until the copies are done.

        Raises:
            DeviceError: CUDA has refused.
        """
        cuda, block = self._cuda, self._block
        stream, event = cuda.stream_create(), cuda.event_create(sleeps=True)
        try:
            with self._lock:
                for array, address in pairs:
                    flat = array.reshape(-1).view(np.uint8)
                    for start in range(0, flat.size, block.size):
                        piece = flat[start : start + block.size]
                        held = block[: piece.size]
                        if to_host:
                            cuda.copy_to_host(held.ctypes.data, address + start, piece.size, stream)
                        else:
                            held[:] = piece
                            cuda.copy_to_device(address + start, held.ctypes.data, piece.size, stream)
                        cuda.event_record(event, stream)
                        cuda.event_synchronize(event)
                        if to_host:
                            piece[:] = held
        finally:
            cuda.event_destroy(event)
            cuda.stream_destroy(stream)
