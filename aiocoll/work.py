"""`Work`: the handle of one started operation, awaitable any number of times by any number of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Generator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from aiocoll.completion import AT_ONCE, Completion, Owner, Progress, is_wait, make_completion
from aiocoll.native import core
from aiocoll.threads import wait_in_thread

__all__ = ["Handle", "Work", "call_at_end", "completion_of", "finished_work"]

T_co = TypeVar("T_co", covariant=True)

_thread: Final = threading.get_ident


class Handle:
    """The base class of `Work` in pure Python. The accelerator provides a base class of its own."""

    __slots__ = ("_completion",)

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        if not completion.done:
            completion.handle = self

    def __await__(self) -> Generator[Any, None, Any]:
        completion = self._completion
        if completion.unretrieved is not None:
            completion.unretrieved.mark_awaited()
        if not completion.done:
            progress = completion.progress
            # A loop that runs in this thread is the current loop. Looking up the current loop takes a system call on
            # Python 3.11.
            if _thread() != progress.runtime.thread or not progress.loop.is_running():
                _check_loop(self, progress)
            progress.spin(completion)
        if not completion.done:
            waiter = completion.add_waiter()
            try:
                yield from waiter
            except asyncio.CancelledError:
                completion.remove_waiter(waiter)
                raise
        elif completion.progress.turn_is_due():
            yield
        if completion.exception is not None:
            completion.note_retrieval()
            raise completion.exception
        return completion.result

    def done(self) -> bool:
        """Return whether the operation has ended."""
        completion = self._completion
        if completion.unretrieved is not None and completion.done:
            completion.unretrieved.mark_awaited()
        return completion.done

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has ended."""
        completion = self._completion
        if not completion.done:
            raise asyncio.InvalidStateError(f"{self!r} has not ended; await it")
        completion.note_retrieval()
        return completion.exception

    def result(self) -> Any:
        """Return the result of an operation that has ended."""
        if (error := self.exception()) is not None:
            raise error
        return self._completion.result


def _check_loop(work: Any, progress: Progress) -> None:
    """Raise an error if the running event loop is not the loop of the work's group.

    Raises:
        RuntimeError: the work belongs to another event loop.
    """
    if asyncio._get_running_loop() is not progress.loop:
        raise RuntimeError(
            f"{work!r} belongs to another event loop: from another thread use `work.wait()`, or "
            "`asyncio.run_coroutine_threadsafe(work.join(), loop).result()` with the loop of its group"
        )


if TYPE_CHECKING or core is None:
    _Base = Handle
else:
    core.configure(Handle.__await__, Handle.done, Handle.result, Handle.exception, make_completion)
    _Base = core.Handle


_done, _result, _exception = _Base.done, _Base.result, _Base.exception


class Work(_Base, Generic[T_co]):
    """A started operation. Any task of the group's event loop can await it for its result, any number of times.

    Cancelling an await stops only the waiting. The operation continues, unless `abort` ends it. The exception is a
    receive without a matching message, which is withdrawn when its last awaiter is cancelled.

    A failure is retrieved by an await, `result`, `exception`, a callback, a future or `ProcessGroup.drain`. If it is
    never retrieved, it is logged with the line of the call, when the work is collected or its group is closed. On an
    event loop in debug mode, a work that is dropped without being awaited causes a `RuntimeWarning`.
    """

    __slots__ = ("__weakref__",)

    @property
    def op(self) -> str:
        """The operation's name in capitals."""
        return self._completion.op

    @property
    def seq(self) -> int | None:
        """The call's sequence number in its group, or the count of its key; None for point-to-point messages."""
        return self._completion.seq

    @property
    def key(self) -> str | None:
        """The key of a keyed collective; None for other calls."""
        return self._completion.key

    @property
    def group(self) -> Any:
        """The `ProcessGroup` of the operation; None for internal works of the library."""
        owner = self._completion.owner
        return None if owner is None else owner.group

    def __repr__(self) -> str:
        return f"<Work {self._completion.describe()}>"

    if TYPE_CHECKING:
        _completion: Completion

        def __init__(self, completion: Completion) -> None: ...

        def __await__(self) -> Generator[Any, None, T_co]: ...

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or not.

        Returns:
            True as soon as the caller may use the arrays again.
        """
        done: bool = _done(self)
        return done

    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not, like `done`.

        Returns:
            The value of `done`.
        """
        return self.done()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded.

        Returns:
            False also before the end.
        """
        return self.done() and self._completion.exception is None

    def result(self) -> T_co:
        """Return the result of an operation that has ended, or raise its error.

        Returns:
            The same value as awaiting the work.

        Raises:
            asyncio.InvalidStateError: the operation has not ended.
            GroupError: the operation has failed. A custom op or an object may have raised another exception.
        """
        result: T_co = _result(self)
        return result

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has ended.

        Returns:
            The exception that awaiting the work raises; None if the operation has succeeded.

        Raises:
            asyncio.InvalidStateError: the operation has not ended.
        """
        error: BaseException | None = _exception(self)
        return error

    def source_rank(self) -> int:
        """Return the sender's rank of a receive that has completed.

        Returns:
            The sender's rank in the group.

        Raises:
            ValueError: the call is not a receive, or it has not ended.
        """
        source = self._completion.source
        if source is None:
            raise ValueError(f"{self!r} has no source rank: only a completed receive has one")
        return source

    def cancelled(self) -> bool:
        """Return whether a receive was withdrawn, because the last task that awaited it was cancelled.

        Returns:
            True if awaiting the work raises `asyncio.CancelledError`.
        """
        return self._completion.done and isinstance(self._completion.exception, asyncio.CancelledError)

    def add_done_callback(
        self, fn: Callable[[Work[T_co]], object], *, context: contextvars.Context | None = None
    ) -> None:
        """Call `fn(work)` from the event loop, by `call_soon`, after the operation has ended.

        Args:
            fn: function of this work. Its result is ignored.
            context: context to run it in; None for a copy of the caller's context.

        Raises:
            RuntimeError: called in another event loop than the group's.
        """
        completion = self._completion
        if (running := asyncio._get_running_loop()) is not completion.progress.loop:
            progress = completion.progress
            if running is not None:
                _check_loop(self, progress)
            if _thread() != progress.runtime.thread:
                progress.loop.call_soon_threadsafe(partial(self.add_done_callback, fn, context=context))
                return
        if is_wait(fn):
            completion.start_if_held()
        completion.note_await()
        if completion.done:
            if not is_wait(fn):
                completion.note_retrieval()
            completion.progress.loop.call_soon(fn, self, context=context)
        else:
            completion.add_callback(fn, self, contextvars.copy_context() if context is None else context)

    def remove_done_callback(self, fn: Callable[[Work[T_co]], object]) -> int:
        """Remove a callback that has not been called yet.

        Args:
            fn: the argument of `add_done_callback`. All equal callbacks are removed.

        Returns:
            Number of removed callbacks.
        """
        return self._completion.remove_callbacks(fn)

    def get_future(self) -> asyncio.Future[T_co]:
        """Return an asyncio future with the same outcome, for libraries that only accept futures.

        Returns:
            A new future of the group's loop. Cancelling it has the effect of cancelling an await.

        Raises:
            RuntimeError: called in another thread than the loop's.
        """
        completion = self._completion
        if _thread() != completion.progress.runtime.thread:
            _check_loop(self, completion.progress)
        completion.start_if_held()
        future: asyncio.Future[T_co] = completion.progress.loop.create_future()
        completion.note_await()
        waiter = completion.add_waiter()

        def copy(_: asyncio.Future[None]) -> None:
            if future.done():
                return
            completion.note_retrieval()
            if completion.exception is not None:
                future.set_exception(completion.exception)
            else:
                future.set_result(completion.result)

        def dropped(_: asyncio.Future[T_co]) -> None:
            if not waiter.done():
                waiter.cancel()
                completion.remove_waiter(waiter)

        waiter.add_done_callback(copy)
        future.add_done_callback(dropped)
        return future

    def join(self) -> Coroutine[Any, Any, T_co]:
        """Await the work. This coroutine is for `asyncio.create_task` and `asyncio.TaskGroup`.

        Returns:
            The result.

        Raises:
            GroupError: the operation fails, see `ProcessGroup`.
        """
        self._completion.note_await()  # noted here, because the task may be cancelled before its first step
        return self._joined()

    async def _joined(self) -> T_co:
        return await self

    async def on_stream(self, stream: Any = None) -> T_co:
        """Wait until the operation is enqueued on a CUDA device, so that later work on `stream` runs after it.

        Awaiting the work itself takes until the device has finished, and any stream may use the data then. For a call
        on host arrays, or in a block, both are the same.

        Args:
            stream: a stream of the arrays' device: CuPy's, torch's, any object with ``__cuda_stream__``, or an address.
                None for the stream that was current at the call.

        Returns:
            The result. Only `stream` may use its data. A later failure is raised by an await of the work.

        Raises:
            TypeError: `stream` is not a stream.
            GroupError: the operation fails, see `ProcessGroup`.
        """
        completion = self._completion
        if completion.done or completion.order is None:
            return await self
        completion.note_await()
        if not await completion.order(stream):
            return await self
        result: T_co = completion.value if completion.unwrap is None else completion.unwrap()
        return result

    def wait(self, timeout: float | timedelta | None = None) -> T_co:
        """Block a thread that runs no event loop until the operation has ended.

        Any number of threads may wait. They keep waiting if the event loop has stopped, since a thread may run the loop
        again.

        Args:
            timeout: seconds to wait; None or inf to wait without a limit.

        Returns:
            The result.

        Raises:
            RuntimeError: called on the thread of the loop, which must not be blocked (use ``await``), or in a forked
                child; or the loop was closed before the end.
            TimeoutError: the work has not ended in time. It continues.
            GroupError: the operation fails, see `ProcessGroup`.
        """
        progress = self._completion.progress
        if asyncio._get_running_loop() is progress.loop:
            raise RuntimeError("Work.wait() would block the event loop that completes it: use `await work`")
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
            progress.loop.call_soon_threadsafe(self._completion.start_if_held)
        wait_in_thread(self, progress.loop, progress.runtime, timeout)
        return self.result()

    def abort(self) -> None:
        """Revoke the group, so that this work and all other pending works of the group fail on all ranks.

        Raises:
            RuntimeError: called in another process, thread or event loop than the group's.
        """
        if not self._completion.done:
            self.group.abort(f"{self.op} was aborted by rank {self.group.rank()}")


def completion_of(work: Work[Any]) -> Completion:
    """Return the completion to which `work` refers."""
    return work._completion


def call_at_end(work: Work[Any], fn: Callable[[Work[Any]], object]) -> None:
    """Call `fn(work)` synchronously when the operation ends, or now if it has ended. Poll first, as an await does."""
    completion = work._completion
    completion.note_await()
    if not completion.done:
        completion.start_if_held()
        completion.progress.spin(completion)
    if completion.done:
        fn(work)
    else:
        completion.add_callback(fn, work, AT_ONCE)


def finished_work(progress: Progress, op: str, owner: Owner, result: Any) -> Work[Any]:
    """Return the work of a call that moves no data; the work has already ended with `result`."""
    completion = Completion(progress, op, None, None, owner)
    completion.finish(result)
    return Work(completion)
