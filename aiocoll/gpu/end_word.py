"""`EndWord`: a word of host memory that a device writes at the end of a call, for polling event loops.

Querying CUDA may block, because a kernel that waits for a lost rank may block the driver. Reading memory never blocks,
and does not release the GIL.
"""

from __future__ import annotations

from aiocoll.gpu.api import Cuda, DeviceError

__all__ = ["EndWord"]

_NBYTES = 4
_MOST = 2**32 - 1


class EndWord:
    """The end word of one device: the device writes a call's number to it when the call ends.

    Args:
        cuda: the CUDA runtime.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._words: memoryview | None = None
        self._address = self._last = 0
        self._is_refused = False

    def lock(self) -> None:
        """Allocate the word in page-locked memory, which waits for the NCCL calls on the device.

        Raises:
            DeviceError: no memory could be page-locked.
        """
        memory = self._cuda.pinned(_NBYTES)
        memory[:] = 0
        self._address = memory.ctypes.data
        self._words = memory.data.cast("I")

    def free(self) -> None:
        """Free the word's memory. The device must not write to it any more."""
        self._words = None

    def follow(self, stream: int) -> int:
        """Make the device write a new number after all work on `stream`; return the number, or 0 if impossible.

        The device must be the thread's current device.
        """
        if self._words is None or self._is_refused:
            return 0
        self._last = self._last % _MOST + 1
        try:
            self._cuda.stream_write(stream, self._address, self._last)
        except DeviceError:  # some devices do not support it; keep the memory for earlier writes
            self._is_refused = True
            return 0
        return self._last

    def is_last_number(self, number: int) -> bool:
        """Return whether the device has written `number` last, so that the call with this number has ended."""
        return self._words is not None and self._words[0] == number
