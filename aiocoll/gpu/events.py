"""Events of one device, used again and again, and calls that need the thread to use this device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiocoll.gpu.api import Cuda

__all__ = ["Events"]

T = TypeVar("T")


class Events:
    """The events of one device that nobody uses now. Any thread may take and give.

    Args:
        cuda: the runtime.
        ordinal: of the device.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self.cuda = cuda
        self._ordinal = ordinal
        self._free: list[int] = []

    def there(self, call: Callable[[], T]) -> T:
        """Return what `call` returns with the thread on this device; afterwards it is on its own one again.

        The streams 0, 1 and 2 are those of the thread's device, and what is made is made there. A thread whose own
        device nobody has used yet stays on this one: to go back would make a context there.
        """
        cuda = self.cuda
        before = cuda.current()
        if before == self._ordinal:
            return call()
        cuda.use(self._ordinal)
        try:
            return call()
        finally:
            if cuda.has_context(before):
                cuda.use(before)

    def record(self, stream: int) -> int:
        """Return an event that is done when all that is on `stream` now is; the thread must be on this device.

        Raises:
            DeviceError: it cannot be recorded.
        """
        try:
            event = self._free.pop()
        except IndexError:
            event = self.cuda.event_create()
        try:
            self.cuda.event_record(event, stream)
        except BaseException:
            self._free.append(event)
            raise
        return event

    def give(self, event: int) -> None:
        """Take an event back: whoever waits for it on the device goes on waiting for what it stood for."""
        self._free.append(event)

    def destroy(self) -> None:
        """Give all that are free back to CUDA."""
        while self._free:
            self.cuda.event_destroy(self._free.pop())
