"""`Work`: the handle of one started operation, awaitable any number of times by any number of tasks."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Progress", "Work"]

T = TypeVar("T")


class Progress(Protocol):
    """What a work needs of the engine that carries it out."""

    loop: asyncio.AbstractEventLoop

    def spin(self, work: Work[Any]) -> None:
        """Poll for a moment, in the hope that `work` completes."""

    def turn_is_due(self) -> bool:
        """Whether the loop has been held long enough that an await must yield."""


class Work(Generic[T]):
    """One started operation.

    Attributes:
        op: name of the operation in capitals.
        seq: its number in the group, or the count of its key; None for point-to-point.
        key: the key of a keyed collective.
        group: the `ProcessGroup` (None for works of the library's own).

    Cancelling an await stops the waiting, never the operation; `abort` is the way out of that. A receive that no
    message has matched is the exception: it is withdrawn when its last awaiter is cancelled.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_done",
        "_exception",
        "_progress",
        "_result",
        "_source",
        "_unwrap",
        "_waiters",
        "_withdraw",
        "group",
        "key",
        "op",
        "seq",
    )

    def __init__(self, progress: Progress, op: str, seq: int | None, key: str | None, group: Any) -> None:
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
        self._callbacks: list[tuple[Callable[[Work[T]], object], contextvars.Context]] | None = None
        self._withdraw: Callable[[], None] | None = None
        self._unwrap: Callable[[], Any] | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._done else "done" if self._exception is None else "failed"
        name = f" key={self.key!r}" if self.key is not None else ""
        return f"<Work {self.op} seq={self.seq}{name} {state}>"

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            self._progress.spin(self)
        if not self._done:
            yield from self._wait()
        elif self._progress.turn_is_due():
            yield
        if self._exception is not None:
            raise self._exception
        result: T = self._result
        return result

    def done(self) -> bool:
        """Whether the operation has ended, well or not; the buffers are the caller's again."""
        return self._done

    def is_completed(self) -> bool:
        """The same as `done`."""
        return self._done

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._done and self._exception is None

    def result(self) -> T:
        """Return the result or raise the error; before the end, `asyncio.InvalidStateError`."""
        if self.exception() is not None:
            raise self._exception  # type: ignore[misc]
        result: T = self._result
        return result

    def exception(self) -> BaseException | None:
        """Return the error or None; before the end, `asyncio.InvalidStateError`."""
        if not self._done:
            raise asyncio.InvalidStateError(f"{self!r} has not ended; await it")
        return self._exception

    def source_rank(self) -> int:
        """Return the rank whose message a completed receive got."""
        if self._source is None:
            raise ValueError(f"{self!r} has no source rank: only a completed receive has one")
        return self._source

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Call `fn(work)` from the loop (`call_soon`) after the end."""
        if self._done:
            self._progress.loop.call_soon(fn, self)
            return
        callback = fn, contextvars.copy_context()
        if self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def get_future(self) -> asyncio.Future[T]:
        """Return a future with the same outcome, for `asyncio.wait`; cancelling it does not touch the operation."""
        future: asyncio.Future[T] = self._progress.loop.create_future()

        def copy(work: Work[T]) -> None:
            if future.done():
                return
            if work._exception is not None:
                future.set_exception(work._exception)
            else:
                future.set_result(work._result)

        self.add_done_callback(copy)
        return future

    async def join(self) -> T:
        """Await the work: a coroutine for `asyncio.create_task` and `TaskGroup`."""
        return await self

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Block *another thread* until the end.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            RuntimeError: on the thread of the loop, which must not be blocked: use ``await``.
            TimeoutError: the work has not ended in time; it goes on.
        """
        loop = self._progress.loop
        if asyncio._get_running_loop() is loop:
            raise RuntimeError("Work.wait() would block the event loop that completes it: use `await work`")
        ended = threading.Event()
        loop.call_soon_threadsafe(self.add_done_callback, lambda _: ended.set())
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not ended.wait(seconds):
            raise TimeoutError(f"{self!r} has not ended within {seconds} s")
        return self.result()

    def abort(self) -> None:
        """Revoke the group: this and every other pending work of it fails on all ranks."""
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
                except Exception as error:
                    exception = error
        self._done = True
        self._result = result
        self._exception = exception
        self._withdraw = None
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
        if self._callbacks is not None:
            for fn, context in self._callbacks:
                self._progress.loop.call_soon(fn, self, context=context)
            self._callbacks = None

    def _wait(self) -> Generator[Any, None, None]:
        waiter = self._progress.loop.create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            yield from waiter
        except asyncio.CancelledError:
            if self._waiters is not None:
                self._waiters.remove(waiter)
                if not self._waiters and self._withdraw is not None:
                    self._withdraw()
            raise
