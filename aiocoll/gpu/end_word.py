"""`EndWord`: a word of the host's memory that a device writes when a call has ended, so that a loop sees it.

To ask CUDA whether a call has ended may block, if the driver is held up by a kernel that waits for a lost rank. To read
memory does not, nor does it let go of the interpreter.
"""

from __future__ import annotations

from aiocoll.gpu.api import Cuda, DeviceError

__all__ = ["EndWord"]

_NBYTES = 4
_MOST = 2**32 - 1


class EndWord:
    """The word of one device, for one call at a time: it has the number of the last one that has ended of those.

    Args:
        cuda: the runtime.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._words: memoryview | None = None
        self._address = self._last = 0
        self._is_refused = False

    def lock(self) -> None:
        """Lock the memory; where calls of NCCL are on the device, that would wait for them.

        Raises:
            DeviceError: no memory is left that could be locked.
        """
        memory = self._cuda.pinned(_NBYTES)
        memory[:] = 0
        self._address = memory.ctypes.data
        self._words = memory.data.cast("I")

    def free(self) -> None:
        """Free the memory: the device is done with it."""
        self._words = None

    def follow(self, stream: int) -> int:
        """Let the device write a number when all that is on a stream is done; return it, or 0 if that cannot be had.

        The device is the thread's current one.
        """
        if self._words is None or self._is_refused:
            return 0
        self._last = self._last % _MOST + 1
        try:
            self._cuda.stream_write(stream, self._address, self._last)
        except DeviceError:  # not all devices can do it; the memory stays, where earlier numbers may be written yet
            self._is_refused = True
            return 0
        return self._last

    def shows(self, number: int) -> bool:
        """Whether the device has written this number last."""
        return self._words is not None and self._words[0] == number
