"""`LoopThread`: an event loop in a thread of its own, for programs without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from _thread import allocate_lock
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any, Generic, TypeVar, cast, overload
from weakref import WeakSet

from aiocoll.errors import GroupClosedError
from aiocoll.threads import CHECK_INTERVAL
from aiocoll.work import Work, call_at_end

__all__ = ["LoopThread", "Started"]

T = TypeVar("T")

_ident = threading.get_ident
#: All loop threads of this process, to reset them in a forked child, where the threads do not exist.
_threads: WeakSet[LoopThread] = WeakSet()


class Started(Generic[T]):
    """A handle of a call that a `LoopThread` carries out, from `LoopThread.start`. Any thread can use it."""

    __slots__ = ("__weakref__", "_begun", "_callbacks", "_done", "_error", "_locks", "_result", "_task", "_thread")

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._begun = False
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None
        # One lock for each waiting thread. The end of the call releases all locks.
        self._locks: list[Any] = []
        self._callbacks: list[Callable[[Started[T]], object]] = []

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the call has ended. In the main thread, Ctrl-C ends the wait and not the call.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            Whether the call has ended.

        Raises:
            RuntimeError: on the thread of the loop, which must not be blocked.
        """
        if not self._done:
            self._thread.check_wait()
            lock = allocate_lock()
            lock.acquire()
            self._locks.append(lock)
            # Wait in intervals, because a signal that arrives just before a wait does not interrupt the wait. Count the
            # remaining seconds down instead of reading a clock, since only the waits take time.
            left = inf if timeout is None else timeout
            # Either the call had ended before the lock was added, or the end of the call releases it.
            while not self._done and left >= 0.0 and not lock.acquire(timeout=min(left, CHECK_INTERVAL)):
                left -= CHECK_INTERVAL
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Wait until the call has ended, and return its result.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            What the call, or the awaitable that it made, has returned.

        Raises:
            TimeoutError: the call has not ended in time; it goes on.
            RuntimeError: on the thread of the loop, which must not be blocked.
            GroupClosedError: the loop has ended before the call.
            BaseException: what the call raises.
        """
        if (error := self.exception(timeout)) is not None:
            try:
                raise error
            finally:
                del error  # this breaks a reference cycle
        return cast("T", self._result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the call has ended, and return its error.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Returns:
            What `result` would raise; None if the call has succeeded.

        Raises:
            TimeoutError: the call has not ended in time; it goes on.
            RuntimeError: on the thread of the loop, which must not be blocked.
        """
        if not self._done and not self.wait(timeout):
            raise TimeoutError(f"the call has not ended within {timeout} s")
        return self._error

    async def ended(self) -> None:
        """Wait, in a coroutine of the loop, until the call has ended. Only `result` raises the call's error."""
        ended = asyncio.get_running_loop().create_future()
        self.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
        await ended

    def add_done_callback(self, fn: Callable[[Started[T]], object]) -> None:
        """Call `fn(started)` on the thread of the loop when the call has ended, or immediately if it has already ended.

        Args:
            fn: gets this object. It must not block the loop. Its return value is ignored.
        """
        self._callbacks.append(fn)
        if self._done:
            self._call_back()

    def cancel(self) -> None:
        """Cancel the coroutine that carries out the call; a collective that it has started continues."""
        if not self._done and not self._thread.is_closed():
            self._thread.post(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._begun:
            self._begun = True
            self._finish(None, asyncio.CancelledError())

    # -- run on the thread of the loop

    def begin(self, call: Callable[[], Any]) -> None:
        """Call `call()` on the thread of the loop; only `LoopThread` uses this method."""
        if self._begun:
            return
        self._begun = True
        try:
            made = call()
        except BaseException as error:
            self._finish(None, error)
            return
        if isinstance(made, Work):
            call_at_end(made, self._take)
        elif inspect.isawaitable(made):
            self._task = asyncio.get_running_loop().create_task(_result(made))
            self._task.add_done_callback(self._take)
        else:
            self._finish(made, None)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it has ended; only `LoopThread` uses this method."""
        if not self._done:
            self._finish(None, error)

    def _take(self, ended: Any) -> None:
        """Adopt the result or the error of an ended work or task."""
        self._task = None
        if ended.cancelled():
            self._finish(None, self._thread.closed_error() if self._thread.is_ending() else asyncio.CancelledError())
        elif (error := ended.exception()) is not None:
            self._finish(None, error)
        else:
            self._finish(ended.result(), None)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._done = True  # set after the outcome, which other threads read as soon as this is true
        self._thread.forget(self)
        while self._locks:
            self._locks.pop().release()
        self._call_back()

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):  # ends the loop: two threads may run it at a time, so test no length
            while True:
                self._callbacks.pop(0)(self)


async def _result(made: Awaitable[T]) -> T:
    return await made


class LoopThread:
    """An event loop in a daemon thread of its own. The first call starts the thread.

        thread = LoopThread()
        pg = thread.run(make_group())  # a coroutine
        started = thread.start(lambda: pg.allreduce(x))  # goes on
        total = started.result()

    Its methods can be called from any thread. Calls of several threads are carried out in the order of the calls. In a
    forked child the first call starts another thread, since a child has no thread of its parent.

    Args:
        name: of the thread.
        loop_factory: makes the event loop; None is uvloop's where it is installed, and asyncio's elsewhere.
    """

    def __init__(
        self, name: str = "aiocoll", loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        self._name = name
        self._factory = loop_factory
        self._closed = False
        self.reset()
        _threads.add(self)

    def reset(self) -> None:
        """Forget the thread in a forked child: it exists only in the parent process."""
        self._guard = threading.Lock()
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None
        self._ident = 0
        self._pending: set[Started[Any]] = set()
        self._ending: asyncio.Event | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop.

        Raises:
            GroupClosedError: the loop has ended.
        """
        if self._thread is None:
            self._open()
        return self._loop

    def is_current(self) -> bool:
        """Return whether the caller runs on the thread of the loop."""
        return _ident() == self._ident

    def is_closed(self) -> bool:
        """Return whether the loop has ended."""
        return self._closed or (self._thread is not None and self._loop.is_closed())

    def is_ending(self) -> bool:
        """Return whether the loop is ending, or has ended."""
        return self.is_closed() or (self._ending is not None and self._ending.is_set())

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function on the thread of the loop, and return without waiting for it.

        Args:
            fn: must not block.
            *args: its arguments.

        Raises:
            GroupClosedError: the loop has ended.
        """
        try:
            self.loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            raise self.closed_error() from None

    @overload
    def start(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Started[T]: ...
    @overload
    def start(self, call: Callable[[], Work[T]]) -> Started[T]: ...
    @overload
    def start(self, call: Callable[[], T]) -> Started[T]: ...
    def start(self, call: Callable[[], Any]) -> Started[Any]:
        """Call a function on the thread of the loop, and return without waiting for it.

        Args:
            call: starts an operation, or makes a coroutine; what it returns is awaited if it is awaitable.

        Returns:
            The call; its `result` waits for the end.

        Raises:
            GroupClosedError: the loop has ended.
        """
        started: Started[Any] = Started(self)
        self._post_call(started, call)
        return started

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its end. Ctrl-C cancels it, and waits for its end too.

        Args:
            coroutine: runs as a task.

        Returns:
            What it returns.

        Raises:
            RuntimeError: on the thread of the loop, which must not be blocked.
            GroupClosedError: the loop has ended.
            BaseException: what the coroutine raises.
        """
        started: Started[T] = Started(self)
        try:
            self.check_wait()
            self._post_call(started, lambda: coroutine)
            return started.result()
        except KeyboardInterrupt:
            started.cancel()
            started.wait()
            raise
        finally:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()

    def close(self) -> None:
        """Cancel the calls that still run, and end the thread. Later calls raise `GroupClosedError`."""
        with self._guard:
            self._closed, thread = True, self._thread
        if thread is None or self.is_current():
            return
        if self._ending is not None:
            with contextlib.suppress(RuntimeError):  # raised if the loop has ended
                self._loop.call_soon_threadsafe(self._ending.set)
        thread.join()

    def check_wait(self) -> None:
        """Raise `RuntimeError` if the caller runs on the thread of the loop."""
        if self.is_current():
            raise RuntimeError(
                "this wait would block the event loop that completes the call; await the ProcessGroup method instead"
            )

    def closed_error(self) -> GroupClosedError:
        """Return the error that calls raise after the loop has ended."""
        return GroupClosedError("the group was closed: its event loop has ended")

    def forget(self, started: Started[Any]) -> None:
        """Remove an ended call from the pending calls, which fail when the loop ends."""
        self._pending.discard(started)

    def _post_call(self, started: Started[T], call: Callable[[], Any]) -> None:
        self._pending.add(started)  # added before the post, because the end of the loop fails the calls in this set
        try:
            self.post(started.begin, call)
        except GroupClosedError:
            self._pending.discard(started)
            raise

    def _open(self) -> None:
        with self._guard:
            if self._closed:
                raise self.closed_error()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._begun.wait()
                self._thread = thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._factory or _fastest_loop()) as runner:
                self._loop, self._ident = runner.get_loop(), _ident()
                runner.run(self._main())
        finally:
            # A call that was posted while the event loop was ending would otherwise wait for ever.
            for started in tuple(self._pending):
                started.fail(self.closed_error())

    async def _main(self) -> None:
        self._ending = asyncio.Event()
        self._begun.set()
        await self._ending.wait()


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # imported here: it takes 20 ms, and few programs have a loop thread
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _reset_threads() -> None:
    for thread in tuple(_threads):
        thread.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_threads)
