"""`LaunchThread`, the launcher thread of a device, and `Launched`, a call in flight on the device.

NCCL may block its caller, and lets only one thread of a process call it for a device at a time. So the event loop makes
a call itself only if the call cannot block, and while the launcher thread is idle.
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
    """The interface of the object that detects the ends of calls on a stream."""

    def put(self, launched: Launched, *, look: bool) -> None:
        """Watch a launched call, and notify its event loop when the call ends; called in launch order.

        Args:
            launched: the call.
            look: whether to check for a moment, in this thread, whether the call has ended.
        """


class LaunchThread:
    """A daemon thread that runs queued CUDA and NCCL calls of one device, one after the other.

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
        # `_counting` protects the number of queued or running calls; `_calling` is held while a call runs.
        self._unfinished = 0
        self._counting = threading.Lock()
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"aiocoll-launch-{ordinal}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a function from any thread. The function must not raise an exception."""
        with self._counting:
            self._unfinished += 1
            self._queue.put(call)

    def attempt(self, launched: Launched, is_current: bool) -> bool:
        """Launch a call in the caller's thread if the launcher thread is idle; return whether it was launched.

        A call that another thread queues meanwhile may run before or after it.

        Args:
            launched: the call.
            is_current: whether this device is the thread's current device.
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
        """Return whether a call is queued or running."""
        return self._unfinished > 0

    def is_wanted(self) -> bool:
        """Return whether a call is queued."""
        return not self._queue.empty()

    def stop(self, seconds: float) -> bool:
        """Stop the thread after the queued calls; return whether the thread has ended within `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(DeviceError):  # the calls will raise the same error
            self._cuda.use(self._ordinal)
            self._cuda.relax()
        while (call := self._queue.get()) is not None:
            with self._calling:
                call()
            del call  # keep no references while idle
            with self._counting:
                self._unfinished -= 1


class Launched:
    """A call in flight: queued for the launcher thread, on the device, or ended but not reported yet.

    Buffers live until the loop observes device completion, awaited or not.

    Attributes:
        enqueued: whether the launcher has put the call on its stream, or failed to.
        error: error of the call or None; set before `enqueued`, or at the end.
        events: pool of events of the device.
        event: event that is done once the call's work is done; 0 before and after.
        number: number that the device writes after the call, see `EndWord`; 0 for none.
        stream: stream of the call's work.
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
        """Run the call's function, which enqueues work on its stream; this must be the current device.

        `look` is passed to `Waiter.put`.
        """
        assert self._call is not None
        try:
            self._call()
        except BaseException as exc:
            self.failed(exc)
        try:
            # Record the event even after an error, because earlier work on the stream, or a part of this call, may be
            # unfinished.
            self.event = self.events.record(self.stream)
        except BaseException as exc:
            self.failed(exc)
        # Set `enqueued` only after `record`, because CUDA reports an event that was never recorded as done.
        self.enqueued = True
        if self._wanted:
            with suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self.release)
        self._waiter.put(self, look=look)

    def failed(self, error: BaseException) -> None:
        """Store the first error of the call instead of raising it, because an error must not end the thread."""
        if self.error is None and isinstance(error, DeviceError):
            self.error = error.with_traceback(None)  # the traceback would keep variables alive
        elif self.error is None:
            self.error = DeviceError("launch", repr(error), fatal=False)
            self.error.__cause__ = error

    async def on_stream(self, stream: int) -> None:
        """Make later work on `stream` wait for this call; runs in the event loop.

        Returns once the wait is enqueued; the host does not wait for the device.

        Raises:
            DeviceError: the call was not launched, has failed, or was released before.
        """
        if not self.enqueued:
            waiting = self.loop.create_future()
            self._wanted.append(waiting)
            if self.enqueued:  # the launcher may have looked for waiting tasks before this one was added
                self.release()
            await waiting
        if self.error is not None:
            raise self.error
        if not self.enqueued:
            raise DeviceError("launch", "the call ended before the launcher thread launched it", fatal=False)
        if self.event:  # events are returned to the pool in this thread only
            self.events.on_device(self.events.cuda.stream_wait, stream, self.event)

    def release(self) -> None:
        """Resume the tasks that wait in `on_stream` for the launch of this call; runs in the event loop."""
        for waiting in self._wanted:
            if not waiting.done():
                waiting.set_result(None)

    def end(self) -> None:
        """Report the end of the call to its callback, and drop all references; runs in the event loop."""
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
        """Drop all references without a report; used when the event loop is closed."""
        self._call = self._done = self._keep = None
        if self.event:
            self.events.give(self.event)
            self.event = 0

    def __del__(self) -> None:
        # Return the event to the pool here if the event loop was closed before it reported the end of the call.
        if self.event:
            self.events.give(self.event)
