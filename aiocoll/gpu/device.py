"""A CUDA device as a loop uses it: calls from the loop run on the device, and the loop is told when they end."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from numpy.typing import NDArray

from aiocoll.gpu.api import Cuda, DeviceError
from aiocoll.gpu.bounce import Bounce
from aiocoll.gpu.driver import CAPTURES
from aiocoll.gpu.end_word import EndWord
from aiocoll.gpu.events import Events
from aiocoll.gpu.launch_order import LaunchOrder
from aiocoll.gpu.launcher import Launched, LaunchThread
from aiocoll.gpu.staging import Staging
from aiocoll.gpu.turns import Turns
from aiocoll.gpu.waiter import CompletionThread
from aiocoll.log import logger

__all__ = ["Device", "close_devices"]

T = TypeVar("T")

#: The devices of this process, by runtime and ordinal. A forked child gets a new lock.
_devices: dict[tuple[int, int], Device] = {}
_lock = threading.Lock()
#: The threads of `Device.run_in_thread` that have not ended, and the seconds that a process which exits waits for each.
_threads: WeakSet[threading.Thread] = WeakSet()
EXITING = 5.0


class Device:
    """One device of this process, which all groups and loops share; get it by `Device.of`.

    It has one launcher thread, and a completion thread for each stream.

    Attributes:
        cuda: the runtime.
        ordinal: number of the device.
        staging: its page-locked blocks.
        turns: groups that may become the first one on it, one at a time.
        order: the order of NCCL's calls there.
        forked: this process was forked from the one whose device it is.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        self.forked = False
        self._events = Events(cuda, ordinal, sleeping=True)
        self._marks = Events(cuda, ordinal)
        # Completion threads by stream; and those of closed streams that have not ended yet.
        self._waiters: dict[int, CompletionThread] = {}
        self._closing: dict[int, CompletionThread] = {}
        self._launcher = LaunchThread(cuda, ordinal)
        self.staging = Staging(cuda, self._when_idle)
        self._word = EndWord(cuda)
        self._bounce: Bounce | None = None
        #: What is called in the launcher when no call of NCCL is on the device.
        self._waiting: deque[Callable[[], None]] = deque()
        self.turns = Turns()
        self.order = LaunchOrder()
        #: The stream of NCCL's calls, and how many groups use it; changed under the lock.
        self._common: int | None = None
        self._users = 0
        #: The completion threads of this stream, and of earlier ones that calls may still be on.
        self._of_nccl: list[CompletionThread] = []
        self._lock = threading.Lock()

    @staticmethod
    def of(cuda: Cuda, ordinal: int) -> Device:
        """Return the object for a device; cheap after the first call.

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
                "this process was forked from one that uses CUDA, which does not survive a fork: start it with "
                "multiprocessing.get_context('spawn')"
            )

    def stream(self) -> int:
        """Return a new stream, and start the thread that waits for it.

        The first call of a process on a device takes CUDA long, since it makes a context. If there are arrays on the
        device, the context exists; if not, call this by `run`.

        Raises:
            DeviceError: CUDA refuses.
        """
        self._check()
        waiter = CompletionThread(self.cuda, self.ordinal, self._launcher, self._word, self._idle)
        try:
            stream = self._events.on_device(self.cuda.stream_create)
        except BaseException:
            waiter.stop(_nothing)
            raise
        self._waiters[stream] = waiter
        return stream

    def common_stream(self) -> int:
        """Return the stream of NCCL's calls: those of all groups come one after the other, as NCCL wants them.

        Who has called this calls `leave_common_stream` in the end.

        Raises:
            DeviceError: CUDA refuses.
        """
        with self._lock:
            if self._common is None:
                self._common = self.stream()
                used = [each for each in self._of_nccl if not each.is_idle]
                self._of_nccl = [*used, self._waiters[self._common]]
            self._users += 1
            return self._common

    async def leave_common_stream(self, seconds: float) -> bool:
        """If no other group uses the stream of NCCL's calls, destroy it; see `close_stream`."""
        with self._lock:
            self._users -= 1
            stream = self._common
            if self._users or stream is None:
                return True
            self._common = None
        return await self.close_stream(stream, seconds)

    def prepare(self, polls: bool) -> None:
        """Lock the memory that is needed while calls of NCCL are on the device; in the launcher.

        Args:
            polls: there are awaits that look whether a call has ended.

        Raises:
            DeviceError: no memory is left that could be locked.
        """
        if self._bounce is None:
            self._bounce = Bounce(self.cuda)
            if polls:
                self._word.lock()

    def page_locked(self, nbytes: int) -> NDArray[Any] | None:
        """Return a block of `staging`; None if to lock one would wait for calls of NCCL. In the launcher.

        Raises:
            DeviceError: no memory is left that could be locked.
        """
        found = self.staging.find(nbytes)
        if found is None and self._is_occupied():
            self._when_idle(lambda: self.staging.give(self.staging.take(nbytes)))  # for the next one
            return None
        return self.staging.take(nbytes) if found is None else found

    def copy(self, pairs: Sequence[tuple[NDArray[Any], int]], *, to_host: bool) -> asyncio.Future[None]:
        """Copy between ordinary memory of the host and addresses on the device; return a future of the end."""
        bounce = self._bounce
        assert bounce is not None
        return self.run_in_thread(partial(bounce.copy, pairs, to_host=to_host))

    def _is_occupied(self) -> bool:
        """Whether calls of NCCL are on the device, or may be; in the launcher, so no other comes meanwhile."""
        return any(not each.is_idle for each in self._of_nccl)

    def _when_idle(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        self._launcher.put(self._call_waiting)

    def _idle(self) -> None:
        if self._waiting:
            self._launcher.put(self._call_waiting)

    def _call_waiting(self) -> None:
        while self._waiting and not self._is_occupied():
            with suppress(DeviceError):  # of memory, which is not needed yet
                self._waiting.popleft()()

    def launch(
        self,
        stream: int,
        call: Callable[[], None],
        keep: object,
        done: Callable[[DeviceError | None], None],
        *,
        at_once: bool = False,
        is_current: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Launched:
        """Launch a call on a stream without blocking the running loop.

        The calls of all threads on one device are made one after the other, in order.

        Args:
            stream: one of `stream`.
            call: enqueues work on the stream, after the marks it depends on (see `mark`); runs in the launcher's
                thread, where it may block.
            keep: objects that must live until the work is done.
            done: called in this loop when the work is done, with its error or None; not if the loop is closed by then.
            at_once: the call does not block: make it here, if the launcher has nothing to do.
            is_current: the thread's current device is this one.
            loop: the running one; None: look which it is, for which Python 3.11 makes a system call.

        Raises:
            RuntimeError: no loop runs in this thread; or after a fork.
            ValueError: `stream` is closed.
        """
        self._check()
        waiter = self._waiters.get(stream)
        if waiter is None:
            raise ValueError(f"stream {stream:#x} is closed, or is not one of CUDA device {self.ordinal}")
        if loop is None:
            loop = asyncio.get_running_loop()
        launched = Launched(self._events, waiter, stream, call, keep, done, loop)
        if waiter.admit(launched.launch) and not (at_once and self._launcher.attempt(launched, is_current)):
            self._launcher.put(launched.launch)
        return launched

    def look(self, stream: int, loop: asyncio.AbstractEventLoop) -> bool | None:
        """Report, in the running `loop`, the first call on a stream if it has ended; see `CompletionThread.look`."""
        waiter = self._waiters.get(stream)
        return None if waiter is None else waiter.look(loop)

    @property
    def is_launching(self) -> bool:
        """Whether the launcher has a call, or should have it."""
        return self._launcher.is_busy

    def mark(self, stream: int, is_checked: bool = False) -> int:
        """Return an event that is done when the work on the caller's `stream` so far is; for `after` or `unmark`.

        Args:
            stream: the stream.
            is_checked: `check_capture` has returned True just now.

        Raises:
            DeviceError: the stream cannot be waited for.
            RuntimeError: it is being captured into a graph; or after a fork.
        """
        self._check()
        return self._marks.record(stream) if is_checked else self._marks.on_device(self._mark, stream)

    def after(self, marks: Sequence[int], *streams: int) -> None:
        """Make later work on `streams` wait for `marks`, which must not be used again; in the launcher."""
        try:
            for mark in marks:
                for stream in streams:
                    self.cuda.stream_wait(stream, mark)
        finally:
            for mark in marks:
                self._marks.give(mark)

    def unmark(self, mark: int) -> None:
        """Release a mark that is not needed."""
        self._marks.give(mark)

    def check_capture(self, stream: int) -> bool:
        """Refuse a stream that is being captured into a graph; return whether this is the thread's current device.

        Raises:
            RuntimeError: it is.
        """
        is_current = self.cuda.current() == self.ordinal
        if is_current:
            self._check_capture(stream)
        else:
            self._marks.on_device(self._check_capture, stream)
        return is_current

    def _mark(self, before: int) -> int:
        self._check_capture(before)
        return self._marks.record(before)

    def _check_capture(self, stream: int) -> None:
        try:
            captured = self.cuda.is_capturing(stream)
        except DeviceError as error:
            if error.status not in CAPTURES:
                raise
            captured = True  # the default stream, which would become a part of a capture on another one
        if captured:
            raise RuntimeError(
                f"stream {stream:#x} of CUDA device {self.ordinal} is being captured into a graph: collectives cannot "
                "be part of one; call them before the capture begins or after it has ended"
            )

    def run(self, call: Callable[[], T], late: Callable[[T], object] | None = None) -> asyncio.Future[T]:
        """Call `call`, which may block, in the launcher, after earlier calls; return a future of its result.

        Args:
            call: the function.
            late: called in a thread with the result if the future was cancelled or the loop closed.
        """
        self._check()
        return _carry(self._launcher.put, call, late)

    def run_in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Do what `run` does in a new thread: for calls that must not wait for a launcher that may be stuck."""
        self._check()
        return _carry(self._start_thread, call, None)

    def _start_thread(self, carry: Callable[[], None]) -> None:
        def there() -> None:
            with suppress(DeviceError):  # `call` will raise it
                self.cuda.use(self.ordinal)
                self.cuda.relax()
            carry()

        thread = threading.Thread(target=there, name=f"aiocoll-call-{self.ordinal}", daemon=True)
        thread.start()
        _threads.add(thread)

    async def close_stream(self, stream: int, seconds: float) -> bool:
        """Destroy a stream when all calls launched on it have ended.

        Returns:
            False, with an error in the log, if they have not within `seconds`: a thread and the objects that the calls
            keep then stay until the calls end, if ever.
        """
        self._check()
        loop = asyncio.get_running_loop()
        waiter = self._closing[stream] = self._waiters.pop(stream)
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
        if self._closing.pop(stream, None) is not None:  # `close` may have come first
            with suppress(DeviceError):
                self._events.on_device(self.cuda.stream_destroy, stream)
        return True

    def close(self, seconds: float) -> bool:
        """End all threads after their pending calls, and release everything; for the end of a test.

        Returns:
            False if they have not ended within `seconds` each.
        """
        for waiter in self._waiters.values():
            self._launcher.put(partial(waiter.stop, _nothing))
        self._closing |= self._waiters
        self._waiters = {}
        self.staging.clear()
        if not self._launcher.stop(seconds) or not all(w.join(seconds) for w in self._closing.values()):
            return False
        with suppress(DeviceError):
            self._events.on_device(self._give_back)
        self._bounce = None
        self._word.free()
        return True

    def _give_back(self) -> None:
        while self._waiting:
            self._waiting.popleft()()
        while self._closing:
            self.cuda.stream_destroy(self._closing.popitem()[0])
        self._events.destroy()
        self._marks.destroy()


def close_devices(seconds: float = 10.0) -> bool:
    """Close all devices of this process; return whether all their threads have ended within `seconds` each."""
    with _lock:
        devices = list(_devices.values())
        _devices.clear()
    closed = [device.close(seconds) for device in devices]
    return all(closed)


def _nothing() -> None:
    """Do nothing at the end of a thread that is not waited for."""


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
            logger.warning("the result of a CUDA call came after its cancellation, and undoing it failed: %r", exc)


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


@atexit.register
def _exiting() -> None:
    """Wait for calls of NCCL: the process would crash if its library were taken down under them."""
    for thread in list(_threads):
        thread.join(EXITING)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _threads.clear()
    for device in _devices.values():
        device.forked = True


os.register_at_fork(after_in_child=_forked)
