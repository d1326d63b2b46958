"""Completions: the engine's objects for outcomes of operations. Each `Work` of the user refers to a completion."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
from collections.abc import Callable, Coroutine
from types import CodeType, FrameType
from typing import Any, Final, Protocol

from aiocoll.runtime import Runtime
from aiocoll.unretrieved import CallSite, Unawaited, Unretrieved, UnretrievedFailures
from aiocoll.user_code import contain

__all__ = ["AT_ONCE", "Callback", "Completion", "Owner", "Progress", "is_wait", "make_completion", "watch_works"]

#: Files with this prefix belong to the package, so they contain no call site of the user.
_HERE = os.path.dirname(__file__) + os.sep
#: Depth of the stack frame where the search for the user's call starts. The three inner frames are
#: `Completion.__init__`, its caller and the caller's caller. These always belong to the package, since no public
#: function creates a completion itself.
_INNERMOST: Final = 3
_frame: Final = sys._getframe
#: Sentinel context: run the callback synchronously when the operation ends.
AT_ONCE: Final = contextvars.Context()
#: Files of the package found in call stacks. A lookup in this set is three times faster than comparing the prefix.
_own_files: set[str] = set()
#: File of the user's last call, since most calls come from few files.
_last_file = ""
#: True after a group was made on a loop in debug mode. `_last_file` then stays empty, so that each new completion takes
#: the slow path, which can warn about a work that is never awaited.
_watching = False

#: A callback: the function, its argument, and the context to run it in. None stands for the context of the code that
#: ends the operation.
Callback = tuple[Callable[[Any], object], Any, contextvars.Context | None]


class Progress(Protocol):
    """The methods of the engine, or of a block of calls, that the completions of its operations use."""

    loop: asyncio.AbstractEventLoop
    runtime: Runtime

    def spin(self, completion: Completion) -> None:
        """Poll for up to the spin time, because the operation may end soon."""

    def turn_is_due(self) -> bool:
        """Return whether tasks have kept the loop busy so long that an await must yield to other tasks."""


class Owner(Protocol):
    """The attributes of a group that its completions use.

    Attributes:
        group: the `ProcessGroup`.
        failures: its failures that can still be retrieved.
    """

    group: Any
    failures: UnretrievedFailures


class Completion:
    """The outcome of one started operation, with the futures and callbacks that wait for it.

    Args:
        progress: the engine or block that carries out the operation.
        op: name of the operation in capitals.
        seq: its number in the group, or the count of its key; None for point-to-point.
        key: the key of a keyed collective; None without one.
        owner: the group; None for a part of another operation, which reports failures itself.

    Attributes:
        progress, op, seq, key, owner: the arguments.
        handle: the user's `Work`; None after the end, and for operations without a work.
        shape: shape of the caller's main array, for messages.
        timeout: timeout of the operation in seconds.
        value: the result, unless `unwrap` creates another one.
        unwrap: creates the result at the end, by copying staged data back or decoding bytes; None if not needed.
        ends: for a message, "src" or "dst", the other rank (None for any), and the tag. None for collectives.
        source: the sender of a received message; None before.
        order: for a call on a device in flight, makes a stream of the device wait for it. Returns False if the caller
            must await the work instead. None for other calls.
        withdraw: ends an unmatched receive when its last waiter leaves; None for operations that cannot be withdrawn.
        done: True after the end. It is set after `result` and `exception`, since other threads read it.
        result: the result of an operation that has succeeded.
        exception: the error of an operation that has failed.
        waiters: the futures of pending awaits.
        callbacks: callbacks for the end.
        unretrieved: the failure to be logged if no task retrieves it. Before the end, in debug mode, the warning about
            a work that is never awaited.
        code, instruction: the call site: the user's code object, and the offset of the instruction in it.
    """

    __slots__ = (
        "callbacks",
        "code",
        "done",
        "ends",
        "exception",
        "handle",
        "instruction",
        "key",
        "op",
        "order",
        "owner",
        "progress",
        "result",
        "seq",
        "shape",
        "source",
        "timeout",
        "unretrieved",
        "unwrap",
        "value",
        "waiters",
        "withdraw",
    )

    # `expect` or the dispatcher assigns these attributes; `__init__` does not.
    shape: tuple[int, ...]
    timeout: float
    value: Any

    def __init__(self, progress: Progress, op: str, seq: int | None, key: str | None, owner: Owner | None) -> None:
        self.progress = progress
        self.op = op
        self.seq = seq
        self.key = key
        self.owner = owner
        self.handle: Any = None
        self.unwrap: Callable[[], Any] | None = None
        self.ends: tuple[str, int | None, int] | None = None
        self.source: int | None = None
        self.order: Callable[[Any], Coroutine[Any, Any, bool]] | None = None
        self.withdraw: Callable[[], None] | None = None
        self.done = False
        self.result: Any = None
        self.exception: BaseException | None = None
        self.waiters: list[asyncio.Future[None]] | None = None
        self.callbacks: list[Callback] | None = None
        self.unretrieved: Unretrieved | None = None
        # Record code object and instruction, which is fast and keeps no frame alive. `line_of` finds the line later.
        frame = _frame(_INNERMOST)
        while (name := (code := frame.f_code).co_filename) is not _last_file:
            if name not in _own_files or (caller := frame.f_back) is None:
                frame = _user_frame(frame)
                code = frame.f_code
                if _watching and owner is not None and owner.failures.watching:
                    self.unretrieved = Unawaited(owner.failures, CallSite(op, key or seq, code, frame.f_lasti))
                break
            frame = caller
        self.code: CodeType = code
        self.instruction: int = frame.f_lasti

    def init_child(self, parent: Completion) -> None:
        """Initialize this object, instead of `__init__`, as the completion of a child operation of `parent`."""
        self.op, self.seq, self.key, self.owner = parent.op, parent.seq, parent.key, None
        self.progress = parent.progress
        self.code, self.instruction = parent.code, parent.instruction
        self.shape, self.timeout, self.value = parent.shape, parent.timeout, parent.value
        self.done = False
        self.result = self.exception = self.unwrap = self.withdraw = self.handle = None
        self.source = self.waiters = self.callbacks = self.unretrieved = self.ends = self.order = None

    def expect(self, shape: tuple[int, ...], timeout: float, value: Any) -> None:
        """Set the shape, the timeout, and the result of the operation if it succeeds."""
        self.shape, self.timeout, self.value = shape, timeout, value

    def describe(self) -> str:
        """Return a text with the operation's name, sequence number and state."""
        state = "pending" if not self.done else "done" if self.exception is None else "failed"
        number = "" if self.seq is None else f" seq={self.seq}"
        key = "" if self.key is None else f" key={self.key!r}"
        end = ""
        if self.ends is not None:
            what, rank, tag = self.ends
            rank = self.source if rank is None else rank
            end = f" {what}={'any' if rank is None else rank} tag={tag}"
        return f"{self.op}{number}{key}{end} {state}"

    # -- ending the operation

    def finish(self, result: Any, exception: BaseException | None = None) -> None:
        """End the operation with a result or an error. The engine calls this once."""
        if self.unwrap is not None:
            # `unwrap` copies staged data to the user's array, restores a scalar's Python type, or decodes an object.
            unwrap, self.unwrap = self.unwrap, None
            if exception is None:
                try:
                    result = unwrap()
                except BaseException as error:
                    exception = contain(error)
        self.result = result
        self.exception = exception
        self.withdraw = None
        self.handle = None  # breaks a reference cycle
        if exception is not None:
            self.report_failure(exception)
        # Set `done` last: other threads that see it may read all attributes above.
        self.done = True
        if self.waiters is not None:
            for waiter in self.waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self.waiters = None
        if self.callbacks is not None:
            callbacks, self.callbacks = self.callbacks, None
            for fn, argument, context in callbacks:
                if context is AT_ONCE:
                    fn(argument)
                else:
                    self.progress.loop.call_soon(fn, argument, context=context)

    def report_failure(self, error: BaseException) -> None:
        """Record `error` as not yet retrieved, unless a callback will receive it or it is a cancellation."""
        self.note_await()  # from now on, only an unretrieved failure is logged
        self.unretrieved = None
        calls = self.callbacks
        calls_back = calls is not None and any(context is not None and not is_wait(fn) for fn, _, context in calls)
        if self.owner is None or calls_back or isinstance(error, asyncio.CancelledError):
            return
        self.unretrieved = self.owner.failures.of(error)
        if self.unretrieved is not None:
            self.unretrieved.add(CallSite(self.op, self.key or self.seq, self.code, self.instruction))

    def note_await(self) -> None:
        """Record that the program, or another operation, waits for this operation."""
        if self.unretrieved is not None:
            self.unretrieved.mark_awaited()

    def note_retrieval(self) -> None:
        """Record that the program has retrieved the outcome."""
        if self.unretrieved is not None:
            self.unretrieved.retrieved()

    # -- waiting

    def start_if_held(self) -> None:
        """Start the operation if a coalescing block has only recorded it; called by waits other than await."""

    def add_waiter(self) -> asyncio.Future[None]:
        """Return a future for a task that awaits the operation; the future is done when the operation ends."""
        waiter: asyncio.Future[None] = self.progress.loop.create_future()
        if self.done:
            waiter.set_result(None)
        elif self.waiters is None:
            self.waiters = [waiter]
        else:
            self.waiters.append(waiter)
        return waiter

    def remove_waiter(self, waiter: asyncio.Future[None]) -> None:
        """Remove the future of a task that no longer awaits the operation."""
        if self.waiters is not None:
            self.waiters.remove(waiter)
            if not self.waiters and self.withdraw is not None:
                self.withdraw()

    def add_callback(self, fn: Callable[[Any], object], argument: Any, context: contextvars.Context | None) -> Callback:
        """Call `fn(argument)` when this operation, which is in flight, ends.

        Args:
            fn: the callback.
            argument: its argument.
            context: context in which `call_soon` runs the callback; `AT_ONCE` to call it synchronously. None marks a
                callback that does not retrieve failures.

        Returns:
            The entry in `callbacks`.
        """
        call = fn, argument, context
        if self.callbacks is None:
            self.callbacks = [call]
        else:
            self.callbacks.append(call)
        return call

    def remove_callbacks(self, fn: Callable[[Any], object]) -> int:
        """Remove the user's callbacks that are equal to `fn`, and return their number."""
        calls = self.callbacks or []
        kept = [call for call in calls if call[2] is None or call[2] is AT_ONCE or call[0] != fn]
        self.callbacks = kept or None
        return len(calls) - len(kept)

    def call_at_end(self, fn: Callable[[Completion], object]) -> None:
        """Call `fn(self)` synchronously when the operation in flight ends."""
        self.add_callback(fn, self, AT_ONCE)

    async def wait_end(self) -> None:
        """Wait until the operation ends, without starting a recorded operation or marking an error as retrieved."""
        if not self.done:
            self.progress.spin(self)
        if self.done:
            if self.progress.turn_is_due():
                await asyncio.sleep(0)
            return
        ended = self.progress.loop.create_future()
        call = self.add_callback(lambda _: None if ended.done() else ended.set_result(None), None, None)
        try:
            await ended
        finally:
            if self.callbacks is not None:
                self.callbacks.remove(call)


def make_completion(
    progress: Progress,
    owner: Owner | None,
    facts: tuple[Any, ...],
    waiters: list[Any] | None,
    guard: Unretrieved | None,
    handle: Any,
    completion: Completion | None = None,
) -> Completion:
    """Return the completion of a call that the C accelerator has started.

    Args:
        progress: the engine or block that carries out the operation.
        owner: the group; None for a part of another operation.
        facts: op, seq, key, shape, timeout, value, code and instruction of the `Completion`.
        waiters: the futures of awaits.
        guard: the warning about a work that is never awaited.
        handle: the work; None for an operation that has succeeded.
        completion: a completion that is not initialized; None for a new one.
    """
    if completion is None:
        completion = Completion.__new__(Completion)
    completion.progress, completion.owner = progress, owner
    completion.op, completion.seq, completion.key = facts[:3]
    completion.expect(*facts[3:6])
    completion.code, completion.instruction = facts[6:]
    completion.unwrap = completion.withdraw = completion.ends = completion.order = completion.source = None
    completion.exception = completion.callbacks = None
    completion.handle, completion.waiters, completion.unretrieved = handle, waiters, guard
    completion.done = handle is None
    completion.result = completion.value if completion.done else None
    return completion


def is_wait(fn: Any) -> bool:
    """Return whether the callback `fn` belongs to `asyncio.wait`, whose caller retrieves the outcome itself."""
    return getattr(fn, "__module__", None) == "asyncio.tasks"


def _user_frame(frame: FrameType) -> FrameType:
    """Return the first frame outside this package, from `frame` towards its callers."""
    global _last_file
    while (name := frame.f_code.co_filename).startswith(_HERE):
        _own_files.add(name)
        if frame.f_back is None:
            return frame
        frame = frame.f_back
    _last_file = "" if _watching else name
    return frame


def watch_works() -> None:
    """Enable warnings about works that are never awaited, for groups on a loop in debug mode."""
    global _last_file, _watching
    _last_file, _watching = "", True
