"""Pools of events of one device, and calls with this device as the thread's current one.

CUDA blocks who records an event that threads sleep for while 56 of these are pending on its stream (seen on an H200,
driver 580). So only the ends of calls are such, whose number is known; what a stream waits for is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiocoll.gpu.api import Cuda

__all__ = ["Events"]

T = TypeVar("T")


class Events:
    """Events of one device. Any thread may take and give.

    Args:
        cuda: the runtime.
        ordinal: of the device.
        sleeping: threads sleep for them.
    """

    def __init__(self, cuda: Cuda, ordinal: int, sleeping: bool = False) -> None:
        self.cuda = cuda
        self._ordinal = ordinal
        self._sleeping = sleeping
        self._free: list[int] = []

    def on_device(self, call: Callable[..., T], *args: object) -> T:
        """Call `call` with this device as the thread's current one, then restore the previous one; return the result.

        The streams 0, 1 and 2 are those of the thread's device, and streams and events are made there. If the
        thread's previous device has no context yet, this one stays current: going back would make a context there.
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
        """Return an event that is done when the work on `stream` so far is; this must be the current device.

        Raises:
            DeviceError: it cannot be recorded.
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
        """Return an event to the pool: streams that wait for it keep waiting for the recorded work."""
        self._free.append(event)

    def destroy(self) -> None:
        """Destroy all free events."""
        while self._free:
            self.cuda.event_destroy(self._free.pop())
