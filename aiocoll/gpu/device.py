"""A CUDA device as a loop uses it: calls are made in the loop, done on the device, and told to the loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aiocoll.gpu.api import Cuda, DeviceError
from aiocoll.gpu.events import Events
from aiocoll.gpu.launcher import Launched, LaunchThread
from aiocoll.gpu.staging import Staging
from aiocoll.gpu.turns import Turns
from aiocoll.gpu.waiter import CompletionThread
from aiocoll.log import logger

__all__ = ["Device", "close_devices"]

T = TypeVar("T")

#: Those of this process, by runtime and ordinal. The lock is a new one in a forked child.
_devices: dict[tuple[int, int], Device] = {}
_lock = threading.Lock()


class Device:
    """One device of this process, which all groups and loops share; get it by `Device.of`.

    It has one thread that launches, and one for each stream that waits.

    Attributes:
        cuda: the runtime.
        ordinal: of the device.
        staging: its page-locked blocks.
        turns: who may make a communicator on it.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        self.forked = False
        self._events = Events(cuda, ordinal)
        # By stream; and of those that are closed and have not ended yet.
        self._waiters: dict[int, CompletionThread] = {}
        self._leaving: dict[int, CompletionThread] = {}
        self._launcher = LaunchThread(cuda, ordinal)
        self.staging = Staging(cuda, self._launcher.put)
        self.turns = Turns()

    @staticmethod
    def of(cuda: Cuda, ordinal: int) -> Device:
        """Return the one for a device; cheap but the first time.

        Raises:
            RuntimeError: this process was forked from one that uses CUDA.
        """
        found = _devices.get((id(cuda), ordinal))
        if found is None:
            with _lock:
                for other in _devices.values():
                    other._check()
                found = _devices.get((id(cuda), ordinal)) or Device(cuda, ordinal)
                _devices[id(cuda), ordinal] = found
        found._check()
        return found

    def _check(self) -> None:
        if self.forked:
            raise RuntimeError(
                "this process was forked from one that uses CUDA, which does not survive that: start it with "
                "multiprocessing.get_context('spawn')"
            )

    def stream(self) -> int:
        """Return a new stream, and start the thread that waits for it.

        The first thing that a process does on a device takes CUDA long, since it makes a context there. Where there
        are arrays on the device, whatever made them has had that done; without, call it by `run`.

        Raises:
            DeviceError: CUDA refuses.
        """
        self._check()
        waiter = CompletionThread(self.cuda, self.ordinal, self._launcher.is_wanted)
        try:
            stream = self._events.there(self.cuda.stream_create)
        except BaseException:
            waiter.stop(_nothing)
            raise
        self._waiters[stream] = waiter
        return stream

    def launch(
        self,
        stream: int,
        call: Callable[[], None],
        keep: object,
        done: Callable[[DeviceError | None], None],
    ) -> Launched:
        """Do something on a stream; in a running loop, which is not held up.

        What several threads launch on one device goes through one launcher, in the order of the calls.

        Args:
            stream: one of `stream`.
            call: puts work on the stream, after what it has to come after (see `mark`); in the launcher's thread,
                where it may block.
            keep: what has to live until the work is done.
            done: called in this loop when it is, with what went wrong; not if the loop is closed by then.

        Raises:
            RuntimeError: no loop runs in this thread; or after a fork.
            ValueError: `stream` is closed.
        """
        self._check()
        waiter = self._waiters.get(stream)
        if waiter is None:
            raise ValueError(f"stream {stream:#x} of CUDA device {self.ordinal} is closed, or was not made by it")
        loop = asyncio.get_running_loop()
        launched = Launched(self._events, waiter, stream, call, keep, done, loop)
        self._launcher.put(launched.launch)
        return launched

    def mark(self, stream: int) -> int:
        """Return an event that is done when all that is on the caller's `stream` now is; for `after` or `unmark`.

        Raises:
            DeviceError: the stream cannot be waited for.
            RuntimeError: it is being captured into a graph; or after a fork.
        """
        self._check()
        return self._events.there(partial(self._mark, stream))

    def after(self, marks: Sequence[int], *streams: int) -> None:
        """Let what comes on streams come after `marks`, which are not to be used again; in the launcher."""
        try:
            for mark in marks:
                for stream in streams:
                    self.cuda.stream_wait(stream, mark)
        finally:
            for mark in marks:
                self._events.give(mark)

    def unmark(self, mark: int) -> None:
        """Give back a mark that is not needed."""
        self._events.give(mark)

    def check_capture(self, stream: int) -> None:
        """Refuse a stream that is being captured into a graph.

        Raises:
            RuntimeError: it is.
        """
        self._events.there(partial(self._check_capture, stream))

    def _mark(self, before: int) -> int:
        self._check_capture(before)
        return self._events.record(before)

    def _check_capture(self, stream: int) -> None:
        if self.cuda.is_capturing(stream):
            raise RuntimeError(
                f"stream {stream:#x} of CUDA device {self.ordinal} is being captured into a graph: collectives cannot "
                "be part of one; call them before the capture begins or after it has ended"
            )

    def run(self, call: Callable[[], T], late: Callable[[T], object] | None = None) -> asyncio.Future[T]:
        """Let the launcher call `call`, which may block, in its turn; return its result in a future of this loop.

        Args:
            call: what to do.
            late: called with a result that nobody waits for any more, the future being cancelled or the loop closed;
                in a thread.
        """
        self._check()
        return _carry(self._launcher.put, call, late)

    def aside(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Do as `run` does, in a thread of its own, at once: what must not wait for a launcher that may be stuck."""
        self._check()
        return _carry(self._start_aside, call, None)

    def _start_aside(self, carry: Callable[[], None]) -> None:
        def there() -> None:
            with suppress(DeviceError):  # what is called will say it
                self.cuda.use(self.ordinal)
            carry()

        threading.Thread(target=there, name=f"aiocoll-aside-{self.ordinal}", daemon=True).start()

    async def close_stream(self, stream: int, seconds: float) -> bool:
        """Give a stream back when all that was launched on it has ended.

        Returns:
            False if it has not within `seconds`: it is said in the log. A thread and what those calls keep then stay
            until they end, if ever.
        """
        self._check()
        loop = asyncio.get_running_loop()
        waiter = self._leaving[stream] = self._waiters.pop(stream)
        ended = loop.create_future()
        self._launcher.put(partial(waiter.stop, partial(_tell, loop, _settle, ended, None, None, None)))
        try:
            async with asyncio.timeout(seconds):
                await ended
        except TimeoutError:
            logger.warning(
                "CUDA device %d: what was launched on a stream has not ended within %g s; its memory and a thread are "
                "left behind",
                self.ordinal,
                seconds,
            )
            return False
        if self._leaving.pop(stream, None) is not None:  # `close` may have come first
            with suppress(DeviceError):
                self._events.there(partial(self.cuda.stream_destroy, stream))
        return True

    def close(self, seconds: float) -> bool:
        """End all threads, after what they have to do, and give everything back; for the end of a test.

        Returns:
            False if they have not ended within `seconds` each.
        """
        for waiter in self._waiters.values():
            self._launcher.put(partial(waiter.stop, _nothing))
        self._leaving |= self._waiters
        self._waiters = {}
        self.staging.clear()
        if not self._launcher.stop(seconds) or not all(w.join(seconds) for w in self._leaving.values()):
            return False
        with suppress(DeviceError):
            self._events.there(self._give_back)
        return True

    def _give_back(self) -> None:
        while self._leaving:
            self.cuda.stream_destroy(self._leaving.popitem()[0])
        self._events.destroy()


def close_devices(seconds: float = 10.0) -> bool:
    """Close all devices of this process; return whether all their threads have ended within `seconds` each."""
    with _lock:
        devices = list(_devices.values())
        _devices.clear()
    closed = [device.close(seconds) for device in devices]
    return all(closed)


def _nothing() -> None:
    """Be called at the end of a thread that nobody waits for."""


def _carry(
    start: Callable[[Callable[[], None]], None], call: Callable[[], T], late: Callable[[T], object] | None
) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def carry() -> None:
        try:
            result = call()
        except BaseException as exc:
            _tell(loop, _settle, future, None, exc, None)
            return
        undo = partial(_undo, late, result)
        if not _tell(loop, _settle, future, result, None, partial(start, undo)):
            undo()

    start(carry)
    return future


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> bool:
    """Call in the loop; return False if it is closed."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True


def _undo(late: Callable[[T], object] | None, result: T) -> None:
    if late is not None:
        try:
            late(result)
        except Exception as exc:
            logger.warning("a result came from CUDA that nobody waited for, and undoing it has failed: %r", exc)


def _settle(
    future: asyncio.Future[Any], result: Any, error: BaseException | None, late: Callable[[], object] | None
) -> None:
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    elif late is not None:
        late()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for device in _devices.values():
        device.forked = True


os.register_at_fork(after_in_child=_forked)
