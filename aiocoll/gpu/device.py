"""`Device`: launches the calls of all event loops on one CUDA device, and notifies the loops of their ends."""

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

#: The devices of this process, by runtime and device number. A forked child gets a new lock.
_devices: dict[tuple[int, int], Device] = {}
_lock = threading.Lock()
#: Running threads of `Device.run_in_thread`, and the maximum seconds for which an exiting process joins each of them.
_threads: WeakSet[threading.Thread] = WeakSet()
EXITING = 5.0


class Device:
    """A CUDA device of this process, shared by all groups and event loops; see `Device.of`.

    A device has one launcher thread, and a completion thread for each stream.

    Attributes:
        cuda: the CUDA runtime.
        ordinal: number of the device.
        staging: pool of page-locked blocks.
        turns: turns of groups that create a communicator on the device.
        order: order of NCCL calls on the device.
        forked: whether this process was forked from the process that used the device.
    """

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        self.forked = False
        self._events = Events(cuda, ordinal, sleeping=True)
        self._marks = Events(cuda, ordinal)
        # Completion threads by stream: of open streams, and of closed streams whose threads have not ended yet.
        self._waiters: dict[int, CompletionThread] = {}
        self._closing: dict[int, CompletionThread] = {}
        self._launcher = LaunchThread(cuda, ordinal)
        self.staging = Staging(cuda, self._call_when_idle)
        self._word = EndWord(cuda)
        self._bounce: Bounce | None = None
        #: Functions that the launcher thread runs once no NCCL call is on the device, because they would wait for NCCL
        #: calls.
        self._waiting: deque[Callable[[], None]] = deque()
        self.turns = Turns()
        self.order = LaunchOrder()
        #: The stream of all groups' NCCL calls, and the number of groups that use the stream. Changed only under
        #: `_lock`.
        self._common: int | None = None
        self._users = 0
        #: Completion threads of the common stream, and of earlier common streams whose NCCL calls may not have ended.
        self._of_nccl: list[CompletionThread] = []
        self._lock = threading.Lock()

    @staticmethod
    def of(cuda: Cuda, ordinal: int) -> Device:
        """Return the process-wide `Device` for a device number; the first call creates it.

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
        """Return a new stream, and start the completion thread that watches it.

        The first call of a process on a device takes long, because CUDA makes a context. If there are arrays on the
        device, the context exists. Otherwise call this through `run`.

        Raises:
            DeviceError: CUDA has refused.
        """
        self._check()
        waiter = CompletionThread(self.cuda, self.ordinal, self._launcher, self._word, self._on_launcher_idle)
        try:
            stream = self._events.on_device(self.cuda.stream_create)
        except BaseException:
            waiter.stop(_do_nothing)
            raise
        self._waiters[stream] = waiter
        return stream

    def common_stream(self) -> int:
        """Return the stream of all groups' NCCL calls, which must run one after the other on the device.

        Each caller must call `leave_common_stream` in the end.

        Raises:
            DeviceError: CUDA has refused.
        """
        with self._lock:
            if self._common is None:
                self._common = self.stream()
                used = [each for each in self._of_nccl if not each.is_idle]
                self._of_nccl = [*used, self._waiters[self._common]]
            self._users += 1
            return self._common

    async def leave_common_stream(self, seconds: float) -> bool:
        """Stop using the common stream of NCCL calls; the last group destroys the stream.

        See `close_stream`.
        """
        with self._lock:
            self._users -= 1
            stream = self._common
            if self._users or stream is None:
                return True
            self._common = None
        return await self.close_stream(stream, seconds)

    def prepare(self, polls: bool) -> None:
        """Page-lock the memory that is needed during NCCL calls, when page-locking would block.

        Runs in the launcher thread.

        Args:
            polls: whether awaits poll for the ends of calls.

        Raises:
            DeviceError: no memory could be page-locked.
        """
        if self._bounce is None:
            self._bounce = Bounce(self.cuda)
            if polls:
                self._word.lock()

    def page_locked(self, nbytes: int) -> NDArray[Any] | None:
        """Return a block from the pool `staging`; None if page-locking a new block would wait for NCCL calls.

        Runs in the launcher thread.

        Raises:
            DeviceError: no memory could be page-locked.
        """
        found = self.staging.find(nbytes)
        if found is None and self._is_occupied():
            self._call_when_idle(lambda: self.staging.give(self.staging.take(nbytes)))  # fill the pool for later calls
            return None
        return self.staging.take(nbytes) if found is None else found

    def copy(self, pairs: Sequence[tuple[NDArray[Any], int]], *, to_host: bool) -> asyncio.Future[None]:
        """Copy between pageable host memory and device addresses; return a future for the end of the copies."""
        bounce = self._bounce
        assert bounce is not None
        return self.run_in_thread(partial(bounce.copy, pairs, to_host=to_host))

    def _is_occupied(self) -> bool:
        """Return whether NCCL calls may be on the device.

        Runs in the launcher thread, so that no NCCL call starts meanwhile.
        """
        return any(not each.is_idle for each in self._of_nccl)

    def _call_when_idle(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        self._launcher.put(self._call_waiting)

    def _on_launcher_idle(self) -> None:
        if self._waiting:
            self._launcher.put(self._call_waiting)

    def _call_waiting(self) -> None:
        while self._waiting and not self._is_occupied():
            with suppress(DeviceError):  # ignore a lack of memory, which is not needed yet
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
        """Launch a device call on a stream, without blocking the running event loop.

        The launcher makes the calls of all threads on one device one after the other, in order.

        Args:
            stream: a stream from the method `stream`.
            call: enqueues work on the stream, after the marks that it depends on (see `mark`); runs in the launcher
                thread, where it may block.
            keep: objects that must live until the work is done.
            done: called in this loop when the work is done, with its error or None; not called if the loop is closed.
            at_once: whether the call does not block and may be made in this thread, if the launcher is idle.
            is_current: whether this device is the thread's current device.
            loop: the running loop; None looks it up, for which Python 3.11 makes a system call.

        Raises:
            RuntimeError: no loop runs in this thread; or after a fork.
            ValueError: `stream` is closed.
        """
        self._check()
        waiter = self._waiters.get(stream)
        if waiter is None:
            raise ValueError(f"stream {stream:#x} is closed, or does not belong to CUDA device {self.ordinal}")
        if loop is None:
            loop = asyncio.get_running_loop()
        launched = Launched(self._events, waiter, stream, call, keep, done, loop)
        if waiter.admit(launched.launch) and not (at_once and self._launcher.attempt(launched, is_current)):
            self._launcher.put(launched.launch)
        return launched

    def look(self, stream: int, loop: asyncio.AbstractEventLoop) -> bool | None:
        """Report a stream's oldest pending call to the running `loop` if the call has ended.

        See `CompletionThread.look`.
        """
        waiter = self._waiters.get(stream)
        return None if waiter is None else waiter.look(loop)

    @property
    def is_launching(self) -> bool:
        """Return whether the launcher thread has a queued or running call."""
        return self._launcher.is_busy

    def mark(self, stream: int, is_checked: bool = False) -> int:
        """Return a CUDA event that is done when the work enqueued on the caller's `stream` so far is done.

        Pass the event to `make_streams_wait` or `unmark`.

        Args:
            stream: the stream.
            is_checked: whether `check_capture` has just returned True.

        Raises:
            DeviceError: the stream cannot be waited for.
            RuntimeError: the stream is being captured into a graph; or after a fork.
        """
        self._check()
        return self._marks.record(stream) if is_checked else self._marks.on_device(self._mark, stream)

    def make_streams_wait(self, marks: Sequence[int], *streams: int) -> None:
        """Make later work on `streams` wait for the CUDA events `marks`, then release these events.

        Runs in the launcher thread.
        """
        try:
            for mark in marks:
                for stream in streams:
                    self.cuda.stream_wait(stream, mark)
        finally:
            for mark in marks:
                self._marks.give(mark)

    def unmark(self, mark: int) -> None:
        """Release a CUDA event from `mark` for which no stream will wait."""
        self._marks.give(mark)

    def check_capture(self, stream: int) -> bool:
        """Reject a stream that is being captured; return whether this device is the thread's current device.

        Raises:
            RuntimeError: the stream is being captured.
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
            captured = True  # it is the default stream, which would join another stream's capture
        if captured:
            raise RuntimeError(
                f"stream {stream:#x} of CUDA device {self.ordinal} is being captured into a graph: collectives cannot "
                "be part of one; call them before the capture begins or after it has ended"
            )

    def run(self, call: Callable[[], T], late: Callable[[T], object] | None = None) -> asyncio.Future[T]:
        """Run a function in the launcher thread, after all calls queued before; return a future for its result.

        Args:
            call: the function.
            late: called in a thread with the result if the future was cancelled or the loop closed.
        """
        self._check()
        return _carry(self._launcher.put, call, late)

    def run_in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in a new thread, as the launcher thread may be blocked; return a future for its result."""
        self._check()
        return _carry(self._start_thread, call, None)

    def _start_thread(self, carry: Callable[[], None]) -> None:
        def call_on_device() -> None:
            with suppress(DeviceError):  # `call` will raise the same error
                self.cuda.use(self.ordinal)
                self.cuda.relax()
            carry()

        thread = threading.Thread(target=call_on_device, name=f"aiocoll-call-{self.ordinal}", daemon=True)
        thread.start()
        _threads.add(thread)

    async def close_stream(self, stream: int, seconds: float) -> bool:
        """Destroy a stream once all calls on the stream have ended.

        Returns:
            False, with a warning in the log, if they have not ended within `seconds`. A thread, and the objects that
            the calls keep, then stay until the calls end.
        """
        self._check()
        loop = asyncio.get_running_loop()
        waiter = self._closing[stream] = self._waiters.pop(stream)
        ended = loop.create_future()
        self._launcher.put(partial(waiter.stop, partial(_call_in_loop, loop, _settle, ended, None, None, None)))
        try:
            async with asyncio.timeout(seconds):
                await ended
        except TimeoutError:
            logger.warning(
                "CUDA device %d: calls on a closed stream have not ended within %g s; their memory and a thread stay "
                "allocated until they end",
                self.ordinal,
                seconds,
            )
            return False
        if self._closing.pop(stream, None) is not None:  # `close` may have removed it before
            with suppress(DeviceError):
                self._events.on_device(self.cuda.stream_destroy, stream)
        return True

    def close(self, seconds: float) -> bool:
        """End all threads after their pending calls, and release all resources; for the end of a test.

        Returns:
            False if a thread has not ended within `seconds`.
        """
        for waiter in self._waiters.values():
            self._launcher.put(partial(waiter.stop, _do_nothing))
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
    """Close all devices of this process; return False if a thread has not ended within `seconds`."""
    with _lock:
        devices = list(_devices.values())
        _devices.clear()
    closed = [device.close(seconds) for device in devices]
    return all(closed)


def _do_nothing() -> None:
    """Do nothing: the callback for threads whose end is not awaited."""


def _carry(
    start: Callable[[Callable[[], None]], None], call: Callable[[], T], late: Callable[[T], object] | None
) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def carry() -> None:
        try:
            result = call()
        except BaseException as exc:
            _call_in_loop(loop, _settle, future, None, exc, None)
            return
        undo = partial(_release_late_result, late, result)
        if not _call_in_loop(loop, _settle, future, result, None, partial(start, undo)):
            undo()

    start(carry)
    return future


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> bool:
    """Run a function in an event loop; return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True


def _release_late_result(late: Callable[[T], object] | None, result: T) -> None:
    if late is not None:
        try:
            late(result)
        except Exception as exc:
            logger.warning("could not release the result of a CUDA call that ended after its cancellation: %r", exc)


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
def _wait_for_threads() -> None:
    """Wait at exit for running NCCL calls, because a process that unloads NCCL during a call crashes."""
    for thread in list(_threads):
        thread.join(EXITING)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _threads.clear()
    for device in _devices.values():
        device.forked = True


os.register_at_fork(after_in_child=_forked)
