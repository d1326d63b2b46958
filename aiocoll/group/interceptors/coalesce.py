"""Coalescing: blocks whose calls are fused, and calls on lists of arrays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from aiocoll.completion import Completion
from aiocoll.engine.control.causes import failure_by
from aiocoll.engine.fusion.deferred_completion import DeferredCompletion, MemberCompletion
from aiocoll.errors import GroupError
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.dispatch.interceptor import Interceptor
from aiocoll.group.interceptors.recording import Flusher, Recording
from aiocoll.group.prepared_call import PlannedCall, PreparedCall
from aiocoll.user_code import describe
from aiocoll.work import Work

__all__ = ["Batch", "Coalescer", "check_list", "pairs"]


class Batch:
    """An ``async with`` block whose calls are carried out together; see `ProcessGroup.coalescing`.

    Attributes:
        seq: sequence number of the last flush, to look up in `completed_everywhere`; None before the first flush.
    """

    moves_nothing = False
    records = True

    def __init__(self, dispatcher: Dispatcher, flusher: Flusher, open_batches: dict[Batch, None]) -> None:
        self.seq: int | None = None
        self._dispatcher = dispatcher
        self._flusher = flusher
        self._open = open_batches
        self._failures: list[DeferredCompletion] = []
        #: The calls recorded since the last flush.
        self.recording: Recording
        self.native: Any = None
        self._started: list[Completion] = []
        self._outer: Interceptor | None = None

    async def __aenter__(self) -> Self:
        d = self._dispatcher
        d.check()
        if isinstance(d.block_here(), Batch):
            raise RuntimeError(
                f"group {d.comm.name!r} already has a coalescing block here, and blocks of one group do not nest: make "
                "the calls in the outer block, or await one of its works to send its recorded calls"
            )
        # Fused calls go to the interceptor that is active outside the block.
        self._outer = d.interceptor_here()
        self._start_recording()
        self._open[self] = None
        d.comm.on_revoked.append(self._on_revoked)
        self._scope = d.scoped(self)
        self._scope.__enter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._scope.__exit__(None, None, None)
        try:
            if error is not None:
                self._drop(error)
                return
            self._flush()
            for completion in self._started:
                await _wait_end(completion)
        finally:
            for completion in self._started:
                if completion.withdraw is not None and not completion.waiters:
                    completion.withdraw()
            self._dispatcher.comm.on_revoked.remove(self._on_revoked)
            del self._open[self]
            # Break reference cycles: these objects refer to this block.
            self._started.clear()
            self.native = self.recording.native = None
            del self.recording
        for each in self._failures:
            # Do not raise the CancelledError of a withdrawn receive: it does not count as a failure.
            if not getattr(each, "retrieved", False) and not isinstance(each.exception, asyncio.CancelledError):
                each.note_retrieval()
                assert each.exception is not None
                raise each.exception

    # -- recording

    def take(self, call: PreparedCall) -> Work[Any]:
        """Record a call in the block; return its work."""
        if type(call) is not PlannedCall or call.key is not None:
            if call.key is not None:
                self._dispatcher.check_key(call.key)
            return self.recording.keep(call)
        recording = self.recording
        plan = call.plan
        completion = DeferredCompletion(recording, plan.signature.op, None, None, self._dispatcher)
        completion.plan = plan
        completion.arrays = call.arrays
        completion.value = call.result
        if call.unwrap is not None:
            completion.unwrap = call.unwrap
        if call.limit < recording.limit:
            recording.limit = call.limit
        recording.members.append(completion)
        return Work(completion)

    def recorded(self) -> list[Completion]:
        """Return the completions of recorded calls that have not started."""
        return self.recording.completions()

    # -- flushing

    def _flush(self) -> None:
        """Start all recorded calls; raise the error if one of them cannot start."""
        recording = self.recording
        if recording.is_empty():
            return
        self._start_recording()
        if self._dispatcher.failures.watching:
            recording.note_awaits()
        part = self._flusher.flush(recording, self._outer)
        started = [*self._started, *(loose for loose, _ in recording.loose), *recording.followed]
        recording.loose, recording.followed = [], []
        if part is not None:
            self.seq = part.seq
            started.append(part)
        self._started = [completion for completion in started if not completion.done]

    def _start_recording(self) -> None:
        """Create the recording for the calls until the next flush."""
        self.recording = Recording(self._dispatcher, self._flush_quietly, self._failures.append)
        if self._outer is None:
            self._flusher.record_natively(self.recording)
        self.native = self.recording.native

    def _flush_quietly(self) -> None:
        """Start all recorded calls for a task that awaits one of them. The task gets any error from its work."""
        with contextlib.suppress(Exception):
            self._flush()

    def _drop(self, error: BaseException) -> None:
        """Fail the recorded calls of a block that ended with an exception, without sending anything."""
        cause = GroupError(
            f"the call was not sent: an exception left its coalescing block on rank {self._dispatcher.rank} of group "
            f"{self._dispatcher.comm.name!r}: {describe(error)}",
            group=self._dispatcher.comm.name,
            ranks=[self._dispatcher.rank],
        )
        cause.__cause__ = error
        # The exception itself propagates to the caller: do not report it as unretrieved.
        self._dispatcher.failures.expect(error)
        self.recording.fail(cause)

    def _on_revoked(self) -> None:
        """Fail the recorded calls, because the group was revoked or closed."""
        cause = self._dispatcher.comm.cause
        self.recording.fail(self._dispatcher.closed_error() if cause is None else failure_by(cause))


class Coalescer:
    """The component of a group that makes coalescing blocks, and calls on lists of arrays.

    Args:
        dispatcher: of the group.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._flusher = Flusher(dispatcher)
        self._batches: dict[Batch, None] = {}

    def block(self) -> Batch:
        """Return a new ``async with`` block that records calls."""
        return Batch(self._dispatcher, self._flusher, self._batches)

    def start_list(self, op: str, calls: Callable[[], object], key: str | None) -> Work[list[Any]]:
        """Start the calls that `calls` makes, as one call named `op`. Inside a block, record them instead."""
        d = self._dispatcher
        d.check()
        if key is not None:
            d.check_key(key)
        block = d.block_here()
        inside = isinstance(block, Batch) and key is None
        recording = block.recording if isinstance(block, Batch) and inside else Recording(d, _flush_nothing)
        if not inside and d.interceptor_here() is None:
            self._flusher.record_natively(recording)
        before = len(recording.members)
        limit = recording.limit
        try:
            with d.scoped(_Collector(d, recording)):
                calls()
        except BaseException:
            del recording.members[before:]
            recording.limit = limit
            if not inside:
                recording.native = None
            raise
        members = recording.members[before:]
        whole = DeferredCompletion(recording, op, None, key, d)
        work: Work[list[Any]] = Work(whole)
        recording.add_list(whole, members)
        if not inside:
            flushed = self._flusher.flush(recording, d.interceptor_here(), key)
            whole.seq = None if flushed is None else flushed.seq
        return work

    def deferred(self) -> list[Completion]:
        """Return the completions of calls that the engine has not started: recorded, or held by an interceptor."""
        calls = [call for block in self._batches for call in block.recorded()]
        for flush in self._flusher.intercepted:
            calls += flush.stands_for()
        return calls


class _Collector:
    """An interceptor that records calls on several arrays as members of one list call."""

    moves_nothing = False
    records = True

    def __init__(self, dispatcher: Dispatcher, recording: Recording) -> None:
        self.native = recording.native
        self._dispatcher = dispatcher
        self._recording = recording

    def take(self, call: PreparedCall) -> Work[Any]:
        """Record the call on one array of the list."""
        if not isinstance(call, PlannedCall):
            raise TypeError("the tensors of a list must be dense arrays: make one call per sparse array")
        recording = self._recording
        completion = MemberCompletion(recording, call.op, None, None, None)
        if type(call) is PlannedCall:
            completion.plan = call.plan
        else:  # the call is on device arrays
            completion.plan = None
            completion.call = call
        completion.arrays = call.arrays
        completion.value = call.result
        completion.unwrap, call.unwrap = call.unwrap, None  # only the completion must unwrap the result
        recording.limit = min(recording.limit, call.limit)
        recording.members.append(completion)
        return Work(completion)


def _flush_nothing() -> None:
    """Do nothing, because the caller itself flushes the recording of a list outside of blocks."""


def check_list(tensors: Any, name: str) -> None:
    """Raise an error unless `tensors` is a list of arrays."""
    if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
        raise TypeError(f"{name} must be a list of arrays, not {type(tensors).__name__}")


def pairs(outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    """Return pairs of an output and its input; raise an error unless both lists have the same length."""
    check_list(outputs, "outputs")
    check_list(inputs, "inputs")
    if len(outputs) != len(inputs):
        raise ValueError(f"outputs has {len(outputs)} arrays, inputs has {len(inputs)}: pass one output per input")
    return list(zip(outputs, inputs, strict=True))


async def _wait_end(completion: Completion) -> None:
    """Wait for a completion like an await of its work, but without raising its error."""
    if not completion.done:
        completion.progress.spin(completion)
    if not completion.done:
        waiter = completion.add_waiter()
        try:
            await waiter
        except asyncio.CancelledError:
            completion.remove_waiter(waiter)
            raise
    elif completion.progress.turn_is_due():
        await asyncio.sleep(0)
