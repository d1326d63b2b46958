"""`Events`: a pool of CUDA events of one device.

Recording a sleeping event, for which threads sleep, blocks while 56 of them are pending on the stream (seen on an H200,
driver 580). So only the ends of calls are sleeping events, because their number is limited. Events for which streams
wait are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiocoll.gpu.api import Cuda

__all__ = ["Events"]

T = TypeVar("T")


class Events:
    """A thread-safe pool of CUDA events of one device.

    Args:
        cuda: the CUDA runtime.
        ordinal: number of the device.
        sleeping: whether threads sleep while they wait for the events.
    """

    def __init__(self, cuda: Cuda, ordinal: int, sleeping: bool = False) -> None:
        self.cuda = cuda
        self._ordinal = ordinal
        self._sleeping = sleeping
        self._free: list[int] = []

    def on_device(self, call: Callable[..., T], *args: object) -> T:
        """Run a function with this device as the thread's current device; return its result.

        The streams 0, 1 and 2 belong to the thread's device, and new streams and events are made there. Afterwards the
        previous device is restored, unless it has no context: restoring it would make one.
        """
        cuda = self.cuda
        before = cuda.current()
        if before == self._ordinal:
            return call(*args)
        cuda.use(self._ordinal)
        try:
            return call(*args)
        finally:
            if cuda.has_context(before):
                cuda.use(before)

    def record(self, stream: int) -> int:
        """Record an event after the work on `stream` so far, and return it; this must be the current device.

        Raises:
            DeviceError: the event cannot be recorded.
        """
        try:
            event = self._free.pop()
        except IndexError:
            event = self.cuda.event_create(self._sleeping)
        try:
            self.cuda.event_record(event, stream)
        except BaseException:
            self._free.append(event)
            raise
        return event

    def give(self, event: int) -> None:
        """Return an event to the pool; streams that already wait for the event are not affected."""
        self._free.append(event)

    def destroy(self) -> None:
        """Destroy all unused events in the pool."""
        while self._free:
            self.cuda.event_destroy(self._free.pop())
