"""The thread that waits for what is on one stream, and tells the loops.

There is one for each stream: waiting for a collective, which waits for other ranks, must not hide the end of something
else that those ranks may be waiting for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final
from weakref import WeakValueDictionary

from aiocoll.gpu.api import Cuda, DeviceError
from aiocoll.gpu.launcher import Launched

__all__ = ["Waiter"]

#: Ends that one callback in a loop tells: of some microseconds each, so that others have their turn.
AT_ONCE = 16

#: In place of a call: there is none at this moment.
NOTHING: Final = object()


class Waiter:
    """A thread that sleeps until the calls of one stream have ended, in their order; it never keeps the process.

    Args:
        cuda: the runtime.
        ordinal: of the device.

    Raises:
        RuntimeError: no more threads can be started.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self._cuda = cuda
        self._ordinal = ordinal
        self._queue: SimpleQueue[Launched | None] = SimpleQueue()
        # Batches whose turn has come for a part, by the identity of their loop, in which alone they are looked at. What
        # that loop is to call keeps them: with it they go.
        self._left: WeakValueDictionary[int, deque[Launched]] = WeakValueDictionary()
        self._ended: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=f"aiocoll-wait-{ordinal}", daemon=True)
        self._thread.start()

    def put(self, launched: Launched) -> None:
        """Wait for `launched`, which is on the stream, and tell its loop."""
        self._queue.put(launched)

    def stop(self, ended: Callable[[], object]) -> None:
        """End after all that came before, and call `ended` then, in the thread."""
        self._ended = ended
        self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Return whether the stopped thread has ended within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(DeviceError):  # the waiting will say it
            self._cuda.use(self._ordinal)
        launched: object = NOTHING
        while True:
            if launched is NOTHING:
                launched = self._queue.get()
            if not isinstance(launched, Launched):
                break
            self._wait(launched)
            batch = deque([launched])
            launched = self._drain(batch)
            self._deliver(batch)
            del batch  # nothing is kept while it sleeps
        assert self._ended is not None
        self._ended()

    def _wait(self, launched: Launched) -> None:
        if launched.event:
            try:
                self._cuda.event_synchronize(launched.event)
            except BaseException as exc:
                launched.failed(exc)

    def _drain(self, batch: deque[Launched]) -> object:
        """Add what has ended as well; return the next one, which has not."""
        while True:
            try:
                launched = self._queue.get_nowait()
            except Empty:
                return NOTHING
            if launched is None or not self._is_done(launched):
                return launched
            batch.append(launched)

    def _is_done(self, launched: Launched) -> bool:
        try:
            return not launched.event or self._cuda.event_done(launched.event)
        except BaseException as exc:
            launched.failed(exc)
            return True

    def _deliver(self, batch: deque[Launched]) -> None:
        """Tell each loop of the calls it has made that have ended, once."""
        while batch:
            loop = batch[0].loop
            mine = deque(launched for launched in batch if launched.loop is loop)
            batch = deque(launched for launched in batch if launched.loop is not loop)
            try:
                loop.call_soon_threadsafe(self._end, loop, mine)
            except RuntimeError:  # it is closed
                while mine:
                    mine.popleft().drop()

    def _end(self, loop: asyncio.AbstractEventLoop, batch: deque[Launched]) -> None:
        """Tell of a batch, behind what is left of those before it; in the loop."""
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
