"""`CompletionThread`: notices that calls on a stream have ended, in who has launched them or else a thread.

Waking a thread takes tens of microseconds, as long as a short collective. So the launcher, which is awake, checks for
that long whether a call has ended, if no other call is queued; and so does an await that polls in the loop that has
launched calls. Those that have not ended are left to the thread.

    launcher    puts it on the stream; has it ended?  yes: wakes the loop  no: wakes the thread
    loop        puts it on the stream; await: ended?  yes: goes on         no: wakes the thread at the end of its turn
    thread                                                                     sleeps until it has ended, wakes the loop

The loop itself never asks CUDA: the driver may be blocked by a kernel that waits for a lost rank, and the loop has to
abort that kernel. It reads a word that the device writes behind a call that has no other one before it, see `EndWord`.

Nor does it wake the thread while it launches: each call of CUDA lets go of the interpreter, and a thread that wants it
would have to be told so every time, which takes longer than the call.

There is a thread for each stream: waiting for one collective, which waits for other ranks, must not hide the end of
another call that those ranks may be waiting for.
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

#: Calls on a stream that have not ended; later ones are not launched yet. A launch blocks, and the thread with it, when
#: a stream has some thousand entries, of which a call has a few, or too many events are pending, see `Events`.
AT_MOST = 48

#: Ended calls that one callback in a loop reports: some microseconds each, so that other callbacks run in between.
AT_ONCE = 16
#: How often the launcher checks whether a call has ended. A check takes a microsecond or two, so all of them take about
#: as long as waking a thread.
LOOKS = 32


class CompletionThread:
    """The calls of one stream that have not ended, in order, and a thread that never keeps the process alive.

    Args:
        cuda: the runtime.
        ordinal: of the device.
        launcher: launches the calls.
        word: the device's.
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
        # The launcher puts them in, and wakes the thread, which takes them out.
        self._calls: deque[Launched] = deque()
        self._lock = threading.Lock()
        #: Who wakes the thread releases it; a condition would take some microseconds more.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._is_awake = False
        # The loop at the end of whose turn the thread will be woken.
        self._due_in: asyncio.AbstractEventLoop | None = None
        # Batches by the identity of their loop: the last one that was posted to it, and one whose turn has come for a
        # part, in that loop alone. What the loop is to call keeps them: with it they go.
        self._posted: WeakValueDictionary[int, deque[Launched]] = WeakValueDictionary()
        self._left: WeakValueDictionary[int, deque[Launched]] = WeakValueDictionary()
        self._ended: Callable[[], object] | None = None
        #: How many calls were admitted and have not ended; what launches later ones.
        self._admitted = 0
        self._held: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"aiocoll-wait-{ordinal}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all calls have ended."""
        return not self._admitted

    def admit(self, launch: Callable[[], None]) -> bool:
        """Return whether a call may be launched now; else the launcher calls `launch` when enough others have ended."""
        with self._lock:
            if self._held or self._admitted >= AT_MOST:
                self._held.append(launch)
                return False
            self._admitted += 1
            return True

    def put(self, launched: Launched, *, look: bool) -> None:
        """Tell the loop of `launched` when it has ended; as soon as it is on the stream.

        Args:
            launched: the call.
            look: check for a moment whether it has ended; in the launcher alone.
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
                self._waken()
            elif self._due_in is not launched.loop:
                self._due_in = launched.loop
                launched.loop.call_soon(self._due)
        if is_first and not look:
            launched.number = self._word.follow(launched.stream)

    def look(self, loop: asyncio.AbstractEventLoop) -> bool | None:
        """Report the first call if it has ended, in the running `loop`.

        Returns:
            Whether it has; None: the thread looks, or the device writes nothing behind it.
        """
        with self._lock:
            # What was posted before is reported first.
            if self._is_awake or not self._calls or self._posted.get(id(loop)):
                return None
            number = self._calls[0].number
            if not number:
                return None
            if not self._word.shows(number):
                return False
            ended = deque([self._calls.popleft()])
        self._deliver(ended, loop)
        return True

    def stop(self, ended: Callable[[], object]) -> None:
        """End the thread after the earlier calls, and call `ended` in it; called in the launcher."""
        with self._lock:
            self._ended = ended
            self._waken()

    def join(self, seconds: float) -> bool:
        """Return whether the stopped thread has ended within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _ends_soon(self, launched: Launched) -> bool:
        """Check repeatedly for a short time whether a call has ended; in the launcher."""
        for _ in range(LOOKS):
            if self._is_done(launched):
                return True
            if self._launcher.is_wanted():
                break
        return False

    # -- in the loop

    def _due(self) -> None:
        """Wake the thread for the calls that were launched in one turn of the loop."""
        with self._lock:
            self._due_in = None
            if self._calls:
                self._waken()

    def _end(self, loop: asyncio.AbstractEventLoop, batch: deque[Launched]) -> None:
        """Report a batch, after the rest of earlier ones."""
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

    def _waken(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wake.release()

    def _run(self) -> None:
        with suppress(DeviceError):  # the waiting will raise it
            self._cuda.use(self._ordinal)
            self._cuda.relax()
        while self._sleep():
            first = self._calls[0]
            if not self._is_done(first):
                self._wait(first)
            del first  # keep no references while it sleeps
            self._deliver(self._drain())
        assert self._ended is not None
        self._ended()

    def _sleep(self) -> bool:
        """Sleep until there is a call to wait for; return False if there will be none."""
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
        """Take the first call and all others that have ended."""
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
        """Report the ended calls to the loops that made them, one callback per loop; let later ones start.

        Args:
            batch: the calls.
            here: the loop that runs in this thread.
        """
        for launch in self._released(len(batch)):
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
            except RuntimeError:  # it is closed
                while mine:
                    mine.popleft().drop()

    def _released(self, ended: int) -> Sequence[Callable[[], None]]:
        """Count calls that have ended; return what launches those that may be launched instead."""
        with self._lock:
            self._admitted -= ended
            launches = [self._held.popleft() for _ in range(min(len(self._held), AT_MOST - self._admitted))]
            self._admitted += len(launches)
            if self._ended is not None:
                self._waken()
        return launches
