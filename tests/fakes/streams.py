"""Streams and events of a fake CUDA: each stream is a queue and a thread that does what is in it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from aiocoll.gpu.api import DeviceError

#: Entries of a stream for which there is room; who puts more waits until one is done.
ROOM = 1024
#: Events that threads sleep for and that may be pending on a stream; who records one more waits until one is done.
SLEEPING = 56


class Blocked:
    """All threads that wait for something, so that they can be let go at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: set[threading.Event] = set()
        self.over = False

    def wait(self, event: threading.Event, seconds: float | None = None) -> None:
        """Wait for `event`, or for the end of the fake."""
        with self._lock:
            if self.over:
                return
            self._events.add(event)
        event.wait(seconds)
        with self._lock:
            self._events.discard(event)

    def end(self) -> None:
        """Let all go, and all that come."""
        with self._lock:
            self.over = True
            for event in self._events:
                event.set()


class Mark:
    """A place in a stream. Done when all before it is, or has failed."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.passed = threading.Event()
        device.marks.add(self)

    def reached(self) -> None:
        """All before it is done."""
        self._device.marks.discard(self)
        self.passed.set()

    def done(self, call: str) -> bool:
        """Whether it is done; raises `DeviceError` if the device has failed."""
        self._device.check(call)
        return self.passed.is_set()


class Gate:
    """A kernel that runs until somebody opens it."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        """Let the kernel end."""
        self._open.set()

    def run(self, blocked: Blocked) -> None:
        """Be the kernel."""
        self.running.set()
        blocked.wait(self._open)


class FakeDevice:
    """One device of a fake CUDA: its error, which stays, and its places in streams that are not done."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.error: str | None = None
        self.marks: set[Mark] = set()
        #: A place that is behind all.
        self.past = Mark(self)
        self.past.reached()

    def fail(self, message: str) -> None:
        """Nothing can be done on the device any more."""
        self.error = self.error or message
        for mark in list(self.marks):
            mark.reached()

    def check(self, call: str) -> None:
        """Raise the error of the device, if it has failed."""
        if self.error is not None:
            raise DeviceError(call, self.error)


class FakeStream:
    """A queue of calls, done one after the other by a thread of its own, which is there while there are any.

    Args:
        device: whose stream.
        blocked: where its thread waits.
        full: gets the name of each thread that has to wait since there is no room for more.
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
        #: Of the events that threads sleep for, perhaps some that are done.
        self.sleeping: deque[Mark] = deque()
        # At the end of the fake, none takes anything any more.
        self._over = blocked.over

    def put(self, item: Callable[[], None]) -> None:
        """Let `item` be called when all before it is done."""
        with self._lock:
            if len(self._items) >= ROOM and not self._over:
                self._full.append(threading.current_thread().name)
                self._wake.wait_for(lambda: len(self._items) < ROOM or self._over)
            if self._over:
                return
            self._items.append(item)
            if self._thread is None:
                name = f"fake-cuda-{self.device.ordinal}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def step(self, steps: int | None) -> None:
        """Do `steps` items more, and then stop; None: go on without end."""
        with self._lock:
            self._steps = None if steps is None else (self._steps or 0) + steps
            self._wake.notify_all()

    def close(self) -> None:
        """Take nothing any more; what is there still ends."""
        with self._lock:
            self._over = True
            self._steps = None
            self._wake.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the thread of a closed stream."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                item()
            except Exception as exc:  # what a real kernel does wrong takes the device with it
                self.device.fail(f"an illegal memory access was encountered: {exc}")

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._is_busy = False
            while not (self._items and self._steps != 0):
                if self._over:
                    return None
                self._wake.wait()
            if self._steps is not None:
                self._steps -= 1
            self._is_busy = True
            if len(self._items) >= ROOM:
                self._wake.notify_all()
            return self._items.popleft()

    def _is_idle(self) -> bool:
        """Whether all that was put on it is done; then its thread need not be woken for what takes no time."""
        with self._lock:
            return not (self._items or self._is_busy or self._over) and self._steps is None

    # -- what is put on it

    def mark(self) -> Mark:
        """Return a place behind all that is there now; one that is passed, if there is nothing, as on a real device."""
        if self._is_idle():
            return self.device.past
        mark = Mark(self.device)
        if self.device.error is not None:
            mark.reached()
        self.put(mark.reached)
        return mark

    def wait(self, mark: Mark) -> None:
        """Let what comes wait for a place in another stream."""
        if not (self._is_idle() and mark.passed.is_set()):
            self.put(lambda: self._blocked.wait(mark.passed))

    def kernel(self, work: Callable[[], None], seconds: float) -> None:
        """Do `work`, which takes so long, unless the device has failed by then."""

        def run() -> None:
            if seconds:
                time.sleep(seconds)
            if self.device.error is None:
                work()

        self.put(run)
