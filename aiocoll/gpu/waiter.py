"""Completion threads, which detect the ends of device calls and report them to event loops.

Waking a thread takes tens of microseconds, as long as a short collective. So the launcher, which is awake, first checks
for that long whether a call has ended, if no other call is queued. A polling await does the same in the loop that made
the call. Only calls that take longer are left to the completion thread:

    launcher    enqueues a call; has it ended?    yes: wakes the loop    no: wakes the thread
    loop        enqueues a call; await: ended?    yes: continues         no: wakes the thread at the end of its turn
    thread                                                               sleeps until the call ends, wakes the loop

The loop never calls CUDA for this. A kernel that waits for a lost rank may block the driver, and the loop has to abort
that kernel. Instead, the loop reads a word of memory that the device writes after a call (`EndWord`).

The loop does not wake the thread while it launches calls. Each CUDA call releases the GIL, and a waiting thread would
take it every time, which costs more than the call.

Each stream has its own thread. A thread that waits for one collective, and so for other ranks, must not hide the end of
another call, for which those ranks may be waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from aiocoll.gpu.api import Cuda, DeviceError
from aiocoll.gpu.end_word import EndWord
from aiocoll.gpu.launcher import Launched, LaunchThread

__all__ = ["CompletionThread"]

#: Maximum number of unfinished calls on a stream; later calls are held back. CUDA blocks a launch when the stream has
#: about a thousand entries (a call takes a few), or when too many events are pending (see `Events`).
AT_MOST = 48

#: Maximum number of ended calls reported in one loop callback, because a report takes some microseconds and other
#: callbacks must run.
AT_ONCE = 16
#: Maximum number of times the launcher thread checks whether a call has ended. Together, the checks take about as long
#: as waking a thread.
LOOKS = 32


class CompletionThread:
    """A daemon thread that waits, in launch order, for the ends of the calls on one stream.

    Args:
        cuda: the CUDA runtime.
        ordinal: number of the device.
        launcher: launcher thread of the device.
        word: end word of the device.
        idle: called in any thread when all calls have ended.

    Raises:
        RuntimeError: no more threads can be started.
    """

    def __init__(
        self, cuda: Cuda, ordinal: int, launcher: LaunchThread, word: EndWord, idle: Callable[[], None]
    ) -> None:
        self._cuda = cuda
        self._ordinal = ordinal
        self._launcher = launcher
        self._word = word
        self._idle = idle
        # Calls on the stream. The launcher thread appends calls; this thread removes them when they have ended.
        self._calls: deque[Launched] = deque()
        self._lock = threading.Lock()
        #: A lock that is released to wake the thread: some microseconds faster than a condition variable.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._is_awake = False
        # The event loop that will wake this thread at the end of the loop's iteration; None if no loop will.
        self._due_in: asyncio.AbstractEventLoop | None = None
        # Batches of ended calls by the id of their event loop: the last batch sent to the loop, and the batch of which
        # the loop has reported a part. Only the loop's callbacks keep the batches alive, so a closed loop frees them.
        self._posted: WeakValueDictionary[int, deque[Launched]] = WeakValueDictionary()
        self._left: WeakValueDictionary[int, deque[Launched]] = WeakValueDictionary()
        self._ended: Callable[[], object] | None = None
        #: Number of admitted calls that have not ended, and the launch functions of calls that are held back.
        self._admitted = 0
        self._held: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"aiocoll-wait-{ordinal}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Return whether all calls on the stream have ended."""
        return not self._admitted

    def admit(self, launch: Callable[[], None]) -> bool:
        """Return whether a call may be launched now; if not, the launcher thread runs `launch` later."""
        with self._lock:
            if self._held or self._admitted >= AT_MOST:
                self._held.append(launch)
                return False
            self._admitted += 1
            return True

    def put(self, launched: Launched, *, look: bool) -> None:
        """Watch a launched call, and notify its event loop when the call ends.

        Args:
            launched: the call.
            look: whether to check for a moment whether the call has ended; only in the launcher.
        """
        if look:
            with self._lock:
                is_first = not (self._is_awake or self._calls)
            if is_first and self._ends_soon(launched):
                self._deliver(deque([launched]))
                return
        with self._lock:
            is_first = not (self._is_awake or self._calls)
            self._calls.append(launched)
            if look:
                self._wake_thread()
            elif self._due_in is not launched.loop:
                self._due_in = launched.loop
                launched.loop.call_soon(self._wake_for_launched_calls)
        if is_first and not look:
            launched.number = self._word.follow(launched.stream)

    def look(self, loop: asyncio.AbstractEventLoop) -> bool | None:
        """Report the oldest pending call to the running `loop` if the call has ended.

        Returns:
            Whether it has ended; None if the thread checks it, or the device writes no number after it.
        """
        with self._lock:
            # Batches sent to this loop must be reported before later calls.
            if self._is_awake or not self._calls or self._posted.get(id(loop)):
                return None
            number = self._calls[0].number
            if not number:
                return None
            if not self._word.is_last_number(number):
                return False
            ended = deque([self._calls.popleft()])
        self._deliver(ended, loop)
        return True

    def stop(self, ended: Callable[[], object]) -> None:
        """Stop the thread after the earlier calls; its last action is to call `ended`.

        Runs in the launcher thread.
        """
        with self._lock:
            self._ended = ended
            self._wake_thread()

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` until the stopped thread has ended; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _ends_soon(self, launched: Launched) -> bool:
        """Poll for some microseconds whether a call has ended; runs in the launcher thread."""
        for _ in range(LOOKS):
            if self._is_done(launched):
                return True
            if self._launcher.is_wanted():
                break
        return False

    # -- in the loop

    def _wake_for_launched_calls(self) -> None:
        """Wake the thread once for all calls that the event loop has launched in one iteration."""
        with self._lock:
            self._due_in = None
            if self._calls:
                self._wake_thread()

    def _end(self, loop: asyncio.AbstractEventLoop, batch: deque[Launched]) -> None:
        """Report a batch of ended calls in their event loop, after all earlier batches."""
        earlier = self._left.get(id(loop))
        if earlier is None:
            self._go_on(loop, batch)
        else:
            earlier.extend(batch)

    def _go_on(self, loop: asyncio.AbstractEventLoop, batch: deque[Launched]) -> None:
        try:
            for _ in range(min(len(batch), AT_ONCE)):
                batch.popleft().end()
        finally:
            if batch:
                self._left[id(loop)] = batch
                loop.call_soon(self._go_on, loop, batch)
            else:
                self._left.pop(id(loop), None)

    # -- the thread

    def _wake_thread(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wake.release()

    def _run(self) -> None:
        with suppress(DeviceError):  # waiting will raise the same error
            self._cuda.use(self._ordinal)
            self._cuda.relax()
        while self._sleep():
            first = self._calls[0]
            if not self._is_done(first):
                self._wait(first)
            del first  # keep no references while the thread sleeps
            self._deliver(self._drain())
        assert self._ended is not None
        self._ended()

    def _sleep(self) -> bool:
        """Sleep until the stream has a call to wait for; return False when the thread must end."""
        while True:
            with self._lock:
                if self._is_awake and self._calls:
                    return True
                if self._ended is not None and not self._admitted:
                    return False
                self._is_awake = False
            self._wake.acquire()

    def _wait(self, launched: Launched) -> None:
        try:
            self._cuda.event_synchronize(launched.event)
        except BaseException as exc:
            launched.failed(exc)

    def _drain(self) -> deque[Launched]:
        """Remove and return the first call, which has ended, and all directly following calls that have ended."""
        batch = deque([self._calls.popleft()])
        while self._calls and self._is_done(self._calls[0]):
            batch.append(self._calls.popleft())
        return batch

    def _is_done(self, launched: Launched) -> bool:
        try:
            return not launched.event or self._cuda.event_done(launched.event)
        except BaseException as exc:
            launched.failed(exc)
            return True

    def _deliver(self, batch: deque[Launched], here: asyncio.AbstractEventLoop | None = None) -> None:
        """Report ended calls to their event loops, by one callback per loop; launch calls held back.

        Args:
            batch: the ended calls.
            here: loop that runs in this thread.
        """
        for launch in self._release_ended(len(batch)):
            self._launcher.put(launch)
        if self.is_idle:
            self._idle()
        while batch:
            loop = batch[0].loop
            mine = deque(launched for launched in batch if launched.loop is loop)
            batch = deque(launched for launched in batch if launched.loop is not loop)
            if loop is here:
                self._end(loop, mine)
                continue
            self._posted[id(loop)] = mine
            try:
                loop.call_soon_threadsafe(self._end, loop, mine)
            except RuntimeError:  # the event loop is closed
                while mine:
                    mine.popleft().drop()

    def _release_ended(self, ended: int) -> Sequence[Callable[[], None]]:
        """Subtract `ended` from the count of admitted calls; return launch functions of calls that may now start."""
        with self._lock:
            self._admitted -= ended
            launches = [self._held.popleft() for _ in range(min(len(self._held), AT_MOST - self._admitted))]
            self._admitted += len(launches)
            if self._ended is not None:
                self._wake_thread()
        return launches
