"""Streams and events of a fake CUDA: each stream is a queue with a thread that executes its entries."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from aiocoll.gpu.api import DeviceError

#: The maximum number of entries in a stream. A thread that enqueues more waits until an entry is done.
ROOM = 1024
#: The maximum number of pending events with `sleeps` per stream. A thread that records one more waits.
SLEEPING = 56


class Blocked:
    """The events for which threads of the fake CUDA wait; `end` sets all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: set[threading.Event] = set()
        self.is_closed = False

    def wait(self, event: threading.Event, seconds: float | None = None) -> None:
        """Wait for `event`, or until `end` has been called."""
        with self._lock:
            if self.is_closed:
                return
            self._events.add(event)
        event.wait(seconds)
        with self._lock:
            self._events.discard(event)

    def end(self) -> None:
        """Release all waiting threads, and make later waits return at once."""
        with self._lock:
            self.is_closed = True
            for event in self._events:
                event.set()


class Mark:
    """A position in a stream, which is done when all work before it is done or has failed."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.passed = threading.Event()
        device.marks.add(self)

    def finish(self) -> None:
        """Set the mark to done."""
        self._device.marks.discard(self)
        self.passed.set()

    def is_done(self, call: str) -> bool:
        """Return whether the work before the mark is done; raise a `DeviceError` if the device has failed."""
        self._device.check(call)
        return self.passed.is_set()


class Gate:
    """A kernel that runs until a test calls `open`."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let the kernel end."""
        self._open.set()

    def run(self, blocked: Blocked) -> None:
        """Execute the kernel in the stream's thread."""
        self.running.set()
        blocked.wait(self._open)


class FakeDevice:
    """A device of a fake CUDA, with its permanent error and the pending marks of its streams."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.error: str | None = None
        self.marks: set[Mark] = set()
        #: A mark that is always done.
        self.past = Mark(self)
        self.past.finish()

    def fail(self, message: str) -> None:
        """Make the device fail permanently, and end all waits for its marks."""
        self.error = self.error or message
        for mark in list(self.marks):
            mark.finish()

    def check(self, call: str) -> None:
        """Raise a `DeviceError` if the device has failed."""
        if self.error is not None:
            raise DeviceError(call, self.error)


class FakeStream:
    """A queue of device work with its own thread, which starts with the first entry.

    Args:
        device: the device of the stream.
        blocked: where its thread waits.
        full: list of names, extended with each thread that waits because the stream is full.
    """

    def __init__(self, device: FakeDevice, blocked: Blocked, full: list[str]) -> None:
        self.device = device
        self.capturing = False
        self._blocked = blocked
        self._full = full
        self._lock = threading.Lock()
        self._items: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition(self._lock)
        self._steps: int | None = None
        self._is_busy = False
        #: Marks of recorded events with `sleeps`; some may already be done.
        self.sleeping: deque[Mark] = deque()
        # True if the stream accepts no more work. A stream of a closed fake CUDA never accepts any.
        self._is_closed = blocked.is_closed

    def put(self, item: Callable[[], None]) -> None:
        """Enqueue `item`; the stream's thread calls it when all earlier entries are done."""
        with self._lock:
            if len(self._items) >= ROOM and not self._is_closed:
                self._full.append(threading.current_thread().name)
                self._wake.wait_for(lambda: len(self._items) < ROOM or self._is_closed)
            if self._is_closed:
                return
            self._items.append(item)
            if self._thread is None:
                name = f"fake-cuda-{self.device.ordinal}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def step(self, steps: int | None) -> None:
        """Execute `steps` more entries and then pause; None removes the limit."""
        with self._lock:
            self._steps = None if steps is None else (self._steps or 0) + steps
            self._wake.notify_all()

    def close(self) -> None:
        """Refuse later work; entries already in the queue are still executed."""
        with self._lock:
            self._is_closed = True
            self._steps = None
            self._wake.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the end of a closed stream's thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                item()
            except Exception as exc:  # an error in a real kernel makes the whole device fail
                self.device.fail(f"an illegal memory access was encountered: {exc}")

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._is_busy = False
            while not (self._items and self._steps != 0):
                if self._is_closed:
                    return None
                self._wake.wait()
            if self._steps is not None:
                self._steps -= 1
            self._is_busy = True
            if len(self._items) >= ROOM:
                self._wake.notify_all()
            return self._items.popleft()

    def _is_idle(self) -> bool:
        """Return whether all queue entries are done. If so, a mark or a wait takes effect at once."""
        with self._lock:
            return not (self._items or self._is_busy or self._is_closed) and self._steps is None

    # -- entries

    def mark(self) -> Mark:
        """Return a mark after all current entries; on an idle stream it is already done, as on a real device."""
        if self._is_idle():
            return self.device.past
        mark = Mark(self.device)
        if self.device.error is not None:
            mark.finish()
        self.put(mark.finish)
        return mark

    def wait(self, mark: Mark) -> None:
        """Make entries enqueued later wait for a mark, usually of another stream."""
        if not (self._is_idle() and mark.passed.is_set()):
            self.put(lambda: self._blocked.wait(mark.passed))

    def kernel(self, work: Callable[[], None], seconds: float) -> None:
        """Enqueue a call of `work`, after a delay of `seconds`; skip the call if the device has failed."""

        def run() -> None:
            if seconds:
                time.sleep(seconds)
            if self.device.error is None:
                work()

        self.put(run)
