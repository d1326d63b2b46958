"""The one thread of a device that starts work there, and `Launched`, a call that goes through it.

NCCL may block its caller, and lets only one thread of a process call it for a device at a time. So the loop calls it
only where it certainly does not block, and while that thread has nothing to do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from aiocoll.gpu.api import Cuda, DeviceError
from aiocoll.gpu.events import Events

__all__ = ["LaunchThread", "Launched", "Waiter"]


class Waiter(Protocol):
    """Notices when a call on a stream has ended."""

    def put(self, launched: Launched, *, look: bool) -> None:
        """Notify the loop of `launched` when it has ended; called once it is on the stream, in order.

        Args:
            launched: the call.
            look: check for a moment whether it has ended, in this thread.
        """


class LaunchThread:
    """A thread that makes one call after the other, on its device; it never keeps the process alive.

    Args:
        cuda: the runtime.
        ordinal: of the device.

    Raises:
        RuntimeError: no more threads can be started.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self._cuda = cuda
        self._ordinal = ordinal
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Calls that are queued or running, and who counts them; held by whoever makes a call.
        self._unfinished = 0
        self._counting = threading.Lock()
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"aiocoll-launch-{ordinal}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue `call`, which must not raise; from any thread."""
        with self._counting:
            self._unfinished += 1
            self._queue.put(call)

    def attempt(self, launched: Launched, is_current: bool) -> bool:
        """Launch a call in this thread, unless an earlier one has not returned; return whether it was launched.

        What another thread queues meanwhile may come before or behind it.

        Args:
            launched: the call.
            is_current: the thread's current device is this one.
        """
        if self._unfinished or not self._calling.acquire(blocking=False):
            return False
        try:
            if is_current:
                launched.launch(False)
            else:
                launched.events.on_device(launched.launch, False)
        finally:
            self._calling.release()
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a call is queued or running."""
        return self._unfinished > 0

    def is_wanted(self) -> bool:
        """Whether a call is queued."""
        return not self._queue.empty()

    def stop(self, seconds: float) -> bool:
        """End the thread after the queued calls; return whether it has ended within `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(DeviceError):  # the calls will raise it
            self._cuda.use(self._ordinal)
            self._cuda.relax()
        while (call := self._queue.get()) is not None:
            with self._calling:
                call()
            del call  # keep no references while idle
            with self._counting:
                self._unfinished -= 1


class Launched:
    """A call in flight: in the launcher, on the device, or on the way back to its loop.

    Buffers live until the loop observes device completion, awaited or not.

    Attributes:
        enqueued: the launcher has put it on its stream, or failed to.
        error: its error or None; set before `enqueued`, or at the end.
        events: of its device.
        event: done when all of its work on the stream is; 0 before and after.
        number: what the device writes behind it, see `EndWord`; 0: nothing.
        stream: where its work goes.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_done",
        "_keep",
        "_waiter",
        "_wanted",
        "enqueued",
        "error",
        "event",
        "events",
        "loop",
        "number",
        "stream",
    )

    def __init__(
        self,
        events: Events,
        waiter: Waiter,
        stream: int,
        call: Callable[[], None],
        keep: object,
        done: Callable[[DeviceError | None], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.loop = loop
        self.enqueued = False
        self.error: DeviceError | None = None
        self.event = self.number = 0
        self.events = events
        self.stream = stream
        self._waiter = waiter
        self._call: Callable[[], None] | None = call
        self._keep: object = keep
        self._done: Callable[[DeviceError | None], None] | None = done
        self._wanted: list[asyncio.Future[None]] = []

    def launch(self, look: bool = True) -> None:
        """Put it on its stream, on the thread's device; in the launcher, which then may `look` whether it has ended."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as exc:
            self.failed(exc)
        try:
            # After an error too: earlier work on the stream, perhaps a part of this call, is not done yet.
            self.event = self.events.record(self.stream)
        except BaseException as exc:
            self.failed(exc)
        # Not earlier: an event that was not recorded counts as done.
        self.enqueued = True
        if self._wanted:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.release)
        self._waiter.put(self, look=look)

    def failed(self, error: BaseException) -> None:
        """Keep the first error: no error may end the thread in which it occurs."""
        if self.error is None and isinstance(error, DeviceError):
            self.error = error.with_traceback(None)  # its frames would keep their variables alive
        elif self.error is None:
            self.error = DeviceError("launch", repr(error), fatal=False)
            self.error.__cause__ = error

    async def on_stream(self, stream: int) -> None:
        """Make later work on `stream`, of this thread and device, wait for this call; return once that is enqueued.

        The host does not wait for the device. Called in the loop.

        Raises:
            DeviceError: it was not launched, or has failed, or was released before.
        """
        if not self.enqueued:
            waiting = self.loop.create_future()
            self._wanted.append(waiting)
            if self.enqueued:  # meanwhile; the launcher may have checked for waiters before
                self.release()
            await waiting
        if self.error is not None:
            raise self.error
        if not self.enqueued:
            raise DeviceError("launch", "it was released before it was launched", fatal=False)
        if self.event:  # returned to the pool in this thread only
            self.events.on_device(self.events.cuda.stream_wait, stream, self.event)

    def release(self) -> None:
        """Resume the waiters in `on_stream`: the call is on the stream, or will not be; in the loop."""
        for waiting in self._wanted:
            if not waiting.done():
                waiting.set_result(None)

    def end(self) -> None:
        """Report the end and drop the references; in the loop."""
        done, error = self._done, self.error
        assert done is not None
        try:
            done(error)
        except Exception as exc:
            context = {"message": "a callback of a device call has failed", "exception": exc}
            self.loop.call_exception_handler(context)
        finally:
            del done
            self.drop()

    def drop(self) -> None:
        """Drop the references; the loop is closed, so the end is not reported."""
        self._call = self._done = self._keep = None
        if self.event:
            self.events.give(self.event)
            self.event = 0

    def __del__(self) -> None:
        # The loop was closed before it ran the callback.
        if self.event:
            self.events.give(self.event)
