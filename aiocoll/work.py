"""`Work`: the handle of one started operation, awaitable any number of times by any number of tasks."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from datetime import timedelta
from types import FrameType
from typing import Any, Final, Generic, Protocol, TypeVar

from aiocoll.compiling import mypyc_attr
from aiocoll.elements.streams import stream_address
from aiocoll.runtime import Runtime
from aiocoll.threads import wait_in_thread
from aiocoll.unretrieved import CallSite, Unawaited, Unretrieved
from aiocoll.user_code import contain

__all__ = ["COMPILED", "Progress", "Work", "is_wait", "watch_works"]

T_co = TypeVar("T_co", covariant=True)

#: Whether the hot modules run compiled: this is one of them.
COMPILED: Final = not __file__.endswith(".py")
#: Files that start with this are ours: no call site of the user's.
_HERE = os.path.dirname(__file__) + os.sep
_frame: Final = sys._getframe
_thread: Final = threading.get_ident
#: In place of the context of a callback: it is called at once, by who ends the work.
AT_ONCE: Final = contextvars.Context()
#: The file of the last call, which is not one of ours: most calls come from few files, and comparing objects takes a
#: third of the time of comparing how their names start.
_last_file = ""
#: A group is on a loop in debug mode: `_last_file` stays empty, so every new work takes the branch that may watch it.
_watching = False


class Progress(Protocol):
    """What a work needs of the engine that carries it out."""

    loop: asyncio.AbstractEventLoop
    runtime: Runtime

    def spin(self, work: Work[Any]) -> None:
        """Poll for a moment, in the hope that `work` completes."""

    def turn_is_due(self) -> bool:
        """Whether the loop has been held long enough that an await must yield."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Work(Generic[T_co]):
    """One started operation: await it for its result, any number of times, from any task of the group's loop.

    Cancelling an await stops the waiting, never the operation; `abort` ends that. A receive that no message has matched
    is the exception: it is withdrawn when its last awaiter is cancelled.

    A failure that is never retrieved, by an await, `result`, `exception`, a callback, a future or `ProcessGroup.drain`,
    is logged with the line of the call, when the work is collected or its group is closed. On an event loop in debug
    mode, a work that is dropped without being awaited leads to a `RuntimeWarning`.

    Attributes:
        op: name of the operation in capitals.
        seq: its number in the group, or the count of its key; None for point-to-point.
        key: the key of a keyed collective.
        group: the `ProcessGroup` (None for works of the library's own).
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_code",
        "_done",
        "_ends",
        "_exception",
        "_instruction",
        "_ordered",
        "_progress",
        "_result",
        "_shape",
        "_source",
        "_timeout",
        "_unretrieved",
        "_unwrap",
        "_value",
        "_waiters",
        "_withdraw",
        "group",
        "key",
        "op",
        "seq",
    )

    #: Of what an operation carries out, set by who starts it: the shape of the caller's main array, for messages; the
    #: seconds it may take; and what the work yields if `_unwrap` makes nothing else.
    _shape: tuple[int, ...]
    _timeout: float
    _value: Any
    #: Of a call on a device: lets a stream wait for it. Others do not have it, so that it costs them nothing.
    _ordered: Callable[[int | None], Coroutine[Any, Any, T_co]] | None
    #: Of a message alone: "src" or "dst", the other rank (None: any), and the tag.
    _ends: tuple[str, int | None, int]

    def __init__(
        self,
        progress: Progress,
        op: str,
        seq: int | None,
        key: str | None,
        group: Any,
        depth: int = 2,
        compiled_depth: int = 1,
    ) -> None:
        self.op = op
        self.seq = seq
        self.key = key
        self.group = group
        self._progress = progress
        self._done = False
        self._result: Any = None
        self._exception: BaseException | None = None
        self._source: int | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        # Without a context: of somebody who only wants to know when it ends.
        self._callbacks: list[tuple[Callable[[Work[T_co]], object], contextvars.Context | None]] | None = None
        self._withdraw: Callable[[], None] | None = None
        self._unwrap: Callable[[], Any] | None = None
        if _watching and (earlier := getattr(self, "_unretrieved", None)) is not None:
            earlier.awaited()  # where interpreted code makes a compiled work, this is called twice
        self._unretrieved: Unretrieved | None = None
        # Where the user called, as what costs least and keeps no frame: the line is looked up when it is needed. At
        # `depth` or above it: each frame that is looked at costs 50 ns and more. What is compiled has no frames:
        # `compiled_depth` counts those that are left, mostly that of the group's method alone.
        frame = _frame(compiled_depth if COMPILED else depth)
        code = frame.f_code
        if code.co_filename is not _last_file:
            frame = _user_frame(frame)
            code = frame.f_code
            if _watching and group is not None and group._failures.watching:
                self._watch(CallSite(op, key or seq, code, frame.f_lasti))
        self._code = code
        self._instruction = frame.f_lasti

    def _watch(self, call: CallSite) -> None:
        """Warn if the work is never awaited."""
        self._unretrieved = Unawaited(self.group._failures, call)

    def _expect(self, shape: tuple[int, ...], timeout: float, value: Any) -> None:
        """Set what is known of the operation that ends the work."""
        self._shape, self._timeout, self._value = shape, timeout, value

    def _name_ends(self, ends: tuple[str, int | None, int]) -> None:
        """Set which ranks a message is between."""
        self._ends = ends

    def _order_by(self, order: Callable[[int | None], Coroutine[Any, Any, T_co]] | None) -> None:
        """Let `order` have streams wait for a call on a device; None once that is over."""
        self._ordered = order

    def _be_part_of(self, whole: Work[Any]) -> None:
        """Set what the work of a part has, in place of `__init__`: where the user called is known of the whole."""
        self.op, self.seq, self.key, self.group = whole.op, whole.seq, whole.key, None
        self._progress = whole._progress
        self._code, self._instruction = whole._code, whole._instruction
        self._shape, self._timeout, self._value = whole._shape, whole._timeout, whole._value
        self._done = False
        self._result = self._exception = self._unwrap = self._withdraw = None
        self._source = self._waiters = self._callbacks = self._unretrieved = None

    def _note_await(self) -> None:
        """The program waits for the work, or another work does."""
        if self._unretrieved is not None:
            self._unretrieved.awaited()

    def __repr__(self) -> str:
        state = "pending" if not self._done else "done" if self._exception is None else "failed"
        number = "" if self.seq is None else f" seq={self.seq}"
        key = "" if self.key is None else f" key={self.key!r}"
        return f"<Work {self.op}{number}{key}{self._other_end()} {state}>"

    def __await__(self) -> Generator[Any, None, T_co]:
        if self._unretrieved is not None:
            self._unretrieved.awaited()
        if not self._done:
            progress = self._progress
            # A loop that runs, in this thread, is the running one: which that is takes Python 3.11 a system call.
            if _thread() != progress.runtime.thread or not progress.loop.is_running():
                self._check_loop()
            progress.spin(self)
        if not self._done:
            yield from self._wait()
        elif self._progress.turn_is_due():
            yield
        if self._exception is not None:
            self._look()
            raise self._exception
        result: T_co = self._result
        return result

    def done(self) -> bool:
        """Tell whether the operation has ended, well or not.

        Returns:
            True once its arrays are the caller's again.
        """
        if self._unretrieved is not None and self._done:
            self._unretrieved.awaited()
        return self._done

    def is_completed(self) -> bool:
        """Tell whether the operation has ended, as `done` does.

        Returns:
            What `done` returns.
        """
        return self.done()

    def is_success(self) -> bool:
        """Tell whether the operation has ended well.

        Returns:
            False also before the end.
        """
        return self.done() and self._exception is None

    def result(self) -> T_co:
        """Return the result of an operation that has ended.

        Returns:
            What awaiting the work gives.

        Raises:
            asyncio.InvalidStateError: it has not ended.
            GroupError: it has failed; or another exception, which a custom op or an object has raised.
        """
        if self.exception() is not None:
            raise self._exception  # type: ignore[misc]
        result: T_co = self._result
        return result

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has ended.

        Returns:
            The exception that awaiting the work raises; None if it has ended well.

        Raises:
            asyncio.InvalidStateError: it has not ended.
        """
        if not self._done:
            raise asyncio.InvalidStateError(f"{self!r} has not ended; await it")
        self._look()
        return self._exception

    def source_rank(self) -> int:
        """Return the rank whose message a completed receive got.

        Returns:
            The sender's rank in the group.

        Raises:
            ValueError: this is no receive, or it has not ended.
        """
        if self._source is None:
            raise ValueError(f"{self!r} has no source rank: only a completed receive has one")
        return self._source

    def cancelled(self) -> bool:
        """Tell whether a receive was withdrawn, since its last awaiter was cancelled.

        Returns:
            True if awaiting the work raises `asyncio.CancelledError`.
        """
        return self._done and isinstance(self._exception, asyncio.CancelledError)

    def add_done_callback(
        self, fn: Callable[[Work[T_co]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Call `fn(work)` from the loop, by `call_soon`, after the end.

        Args:
            fn: gets this work; what it returns is ignored.
            context: what it runs in; None is a copy of the caller's.

        Raises:
            RuntimeError: called in another event loop than the group's.
        """
        if (running := asyncio._get_running_loop()) is not None and running is not self._progress.loop:
            self._check_loop()
        self._note_await()
        if self._done:
            if not is_wait(fn):
                self._look()
            self._progress.loop.call_soon(fn, self, context=context)
        else:
            self._call_back(fn, contextvars.copy_context() if context is None else context)

    def remove_done_callback(self, fn: Callable[[Work[T_co]], object]) -> int:
        """Remove a callback that has not been called.

        Args:
            fn: as given to `add_done_callback`; all that are equal to it are removed.

        Returns:
            How many were removed.
        """
        calls = self._callbacks or []
        kept = [call for call in calls if call[1] is None or call[1] is AT_ONCE or call[0] != fn]
        self._callbacks = kept or None
        return len(calls) - len(kept)

    def get_future(self) -> asyncio.Future[T_co]:
        """Return a future with the same outcome, for libraries that take nothing else.

        Returns:
            A new future of the group's loop; cancelling it is like cancelling an await.
        """
        future: asyncio.Future[T_co] = self._progress.loop.create_future()
        self._note_await()
        waiter = self._waiter()

        def copy(_: asyncio.Future[None]) -> None:
            if future.done():
                return
            self._look()
            if self._exception is not None:
                future.set_exception(self._exception)
            else:
                future.set_result(self._result)

        def dropped(_: asyncio.Future[T_co]) -> None:
            if not waiter.done():
                waiter.cancel()
                self._leave(waiter)

        waiter.add_done_callback(copy)
        future.add_done_callback(dropped)
        return future

    def join(self) -> Coroutine[Any, Any, T_co]:
        """Await the work: a coroutine for `asyncio.create_task` and `asyncio.TaskGroup`.

        Returns:
            The result.

        Raises:
            GroupError: the operation fails, see `ProcessGroup`.
        """
        self._note_await()  # also if the task is cancelled before its first step
        return self._joined()

    async def _joined(self) -> T_co:
        return await self

    async def on_stream(self, stream: Any = None) -> T_co:
        """Wait only until a CUDA device has all of it: what is put on `stream` after that comes after the operation.

        An await of the work itself ends when the device is done, and any stream may use the data then. Of a call on
        arrays of the host, or in a block, this is the same.

        Args:
            stream: of the device of the arrays: CuPy's, torch's, any object with ``__cuda_stream__``, or an address;
                None is the one that was current at the call.

        Returns:
            The result; its data is there for `stream` only. A failure after that is raised by an await of the work.

        Raises:
            TypeError: `stream` is no stream.
            GroupError: the operation fails, see `ProcessGroup`.
        """
        ordered: Callable[[int | None], Coroutine[Any, Any, T_co]] | None = getattr(self, "_ordered", None)
        if self._done or ordered is None:
            return await self
        self._note_await()
        return await ordered(None if stream is None else stream_address(stream))

    def wait(self, timeout: float | timedelta | None = None) -> T_co:
        """Block *another thread* until the end; any number of threads may.

        A loop that has stopped is waited for, since another thread may run it again.

        Args:
            timeout: seconds to wait; None and inf wait as long as it takes.

        Returns:
            The result.

        Raises:
            RuntimeError: on the thread of the loop, which must not be blocked: use ``await``; or the loop was closed
                before the end; or in a forked child.
            TimeoutError: the work has not ended in time; it goes on.
            GroupError: the operation fails, see `ProcessGroup`.
        """
        if asyncio._get_running_loop() is self._progress.loop:
            raise RuntimeError("Work.wait() would block the event loop that completes it: use `await work`")
        wait_in_thread(self, self._progress.loop, self._progress.runtime, timeout)
        return self.result()

    def abort(self) -> None:
        """Revoke the group: this and every other pending work of it fails on all ranks.

        Raises:
            RuntimeError: called in another process, thread or event loop than the group's.
        """
        if not self._done:
            self.group.abort(f"{self.op} was aborted by rank {self.group.rank()}")

    def _finish(self, result: Any, exception: BaseException | None = None) -> None:
        """End the work; called once, by the engine."""
        if self._unwrap is not None:
            # Staged data goes back to the user's array, a scalar back to its Python type, bytes to an object.
            unwrap, self._unwrap = self._unwrap, None
            if exception is None:
                try:
                    result = unwrap()
                except BaseException as error:
                    exception = contain(error)
        self._result = result
        self._exception = exception
        self._withdraw = None
        if exception is not None:
            self._failed(exception)
        # Other threads look here, and find all of the above.
        self._done = True
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for fn, context in callbacks:
                if context is AT_ONCE:
                    fn(self)
                else:
                    self._progress.loop.call_soon(fn, self, context=context)

    def _failed(self, error: BaseException) -> None:
        """Keep the failure for whoever looks; a callback does, and a receive is withdrawn because nobody wants it."""
        self._note_await()  # what is reported from now on is the failure
        self._unretrieved = None
        calls = self._callbacks
        calls_back = calls is not None and any(context is not None and not is_wait(fn) for fn, context in calls)
        if calls_back or isinstance(error, asyncio.CancelledError):
            return
        self._unretrieved = self.group._failures.of(error)
        if self._unretrieved is not None:
            self._unretrieved.add(CallSite(self.op, self.key or self.seq, self._code, self._instruction))

    def _check_loop(self) -> None:
        if asyncio._get_running_loop() is not self._progress.loop:
            raise RuntimeError(
                f"{self!r} belongs to another event loop: from another thread use `work.wait()`, or "
                "`asyncio.run_coroutine_threadsafe(work.join(), loop).result()` with the loop of its group"
            )

    def _other_end(self) -> str:
        ends = getattr(self, "_ends", None)
        if ends is None:
            return ""
        what, rank, tag = ends
        rank = self._source if rank is None else rank
        return f" {what}={'any' if rank is None else rank} tag={tag}"

    def _look(self) -> None:
        if self._unretrieved is not None:
            self._unretrieved.retrieved()

    def _wait(self) -> Generator[Any, None, None]:
        waiter = self._waiter()
        try:
            yield from waiter
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _waiter(self) -> asyncio.Future[None]:
        """Return a future of somebody who wants the operation, set at the end."""
        waiter: asyncio.Future[None] = self._progress.loop.create_future()
        if self._done:
            waiter.set_result(None)
        elif self._waiters is None:
            self._waiters = [waiter]
        else:
            self._waiters.append(waiter)
        return waiter

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        """Somebody does not want it any more."""
        if self._waiters is not None:
            self._waiters.remove(waiter)
            if not self._waiters and self._withdraw is not None:
                self._withdraw()

    async def _ended(self) -> None:
        """Wait for the end without wanting the operation, nor looking at how it ended."""
        if not self._done:
            self._progress.spin(self)
        if self._done:
            if self._progress.turn_is_due():
                await asyncio.sleep(0)
            return
        ended = self._progress.loop.create_future()
        call = self._call_back(lambda _: None if ended.done() else ended.set_result(None), None)
        try:
            await ended
        finally:
            if self._callbacks is not None:
                self._callbacks.remove(call)

    def _call_back(
        self, fn: Callable[[Work[T_co]], object], context: contextvars.Context | None
    ) -> tuple[Callable[[Work[T_co]], object], contextvars.Context | None]:
        call = fn, context
        if self._callbacks is None:
            self._callbacks = [call]
        else:
            self._callbacks.append(call)
        return call


def is_wait(fn: Any) -> bool:
    """Whether a callback is that of `asyncio.wait`, which leaves it to its caller to look at the outcome."""
    return getattr(fn, "__module__", None) == "asyncio.tasks"


def _user_frame(frame: FrameType) -> FrameType:
    """Return `frame` or the first one above it that is not of our files."""
    global _last_file
    while frame.f_code.co_filename.startswith(_HERE):
        if frame.f_back is None:
            return frame
        frame = frame.f_back
    _last_file = "" if _watching else frame.f_code.co_filename
    return frame


def watch_works() -> None:
    """Warn about works that are never awaited, in groups that ask for it."""
    global _last_file, _watching
    _last_file, _watching = "", True
