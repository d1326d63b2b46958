"""Recorded calls and their start under one sequence number. Fused calls become one operation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

from numpy.typing import NDArray

from aiocoll.completion import Completion, make_completion
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.fusion.deferred_completion import (
    DeferredCompletion,
    FlushCompletion,
    Member,
    MemberCompletion,
    completion_of_member,
)
from aiocoll.engine.fusion.layout import Bucket, Layout
from aiocoll.engine.fusion.overlap import Span, check_no_overlap, check_spans
from aiocoll.engine.fusion.packer import Flush, Packer, fail
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Ended, Make
from aiocoll.engine.operations.monitored_barrier import MonitoredBarrier
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import P2P
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.dispatch.interceptor import Interceptor, Wrapper
from aiocoll.group.interceptors.fuse import Fuser
from aiocoll.group.prepared_call import FactoryCall, MessageCall, PlannedCall, PreparedCall
from aiocoll.work import Work, completion_of

__all__ = ["Flusher", "Recording"]


class Recording:
    """The recorded calls of a block, which are started together.

    Args:
        dispatcher: dispatcher of the group.
        flush: starts the recorded calls.
        failed: called with each completion that fails.

    Attributes:
        members: collectives without a key; together they take one number.
        loose: messages between two ranks, and collectives with a key: completions with their calls.
        lists: calls on lists: completions with their members.
        limit: smallest timeout of the members, in seconds.
        followed: further completions that the block waits for.
        flushed: whether the calls have been started.
        native: records plain calls in C, as works among the members; None without the accelerator.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        flush: Callable[[], None],
        failed: Callable[[DeferredCompletion], None] = lambda _: None,
    ) -> None:
        self.loop = dispatcher.loop
        self.runtime = dispatcher.runtime
        self.turn_is_due = dispatcher.endpoint.turn_is_due
        self.failed = failed
        self._dispatcher = dispatcher
        self.members: list[Member] = []
        self.native: Any = None
        self.loose: list[tuple[DeferredCompletion, PreparedCall]] = []
        self.lists: list[tuple[DeferredCompletion, list[Member]]] = []
        # Maps each work that the accelerator recorded for a list call to the completion of this list call.
        self._wholes: dict[Work[Any], Completion] = {}
        self.limit = inf
        self.followed: list[Completion] = []
        self.flushed = False
        self._flush = flush
        self._wanted = False

    def spin(self, completion: Completion) -> None:
        """Make progress for a task that awaits `completion`: poll, or start the calls if they are only recorded."""
        if self.flushed:
            self._dispatcher.endpoint.spin(completion)
        else:
            self.start_if_held()

    def start_if_held(self) -> None:
        """Schedule the start of the recorded calls for the end of this loop iteration."""
        if not self._wanted and not self.flushed:
            self._wanted = True
            self.runtime.call_soon(self._flush)

    def follow(self, completion: Completion) -> None:
        """Add a completion for which the block waits, too."""
        self.followed.append(completion)

    def keep(self, call: PreparedCall) -> Work[Any]:
        """Record a call without a plan, or with a key; return its work."""
        completion = DeferredCompletion(self, call.op, None, call.key, self._dispatcher)
        call.expect(completion)
        if call.signature is not None and call.key is None:
            completion.plan = None
            completion.call = call
            self.limit = min(self.limit, call.limit)
            self.members.append(completion)
        else:
            self.loose.append((completion, call))
            if isinstance(call, MessageCall) and call.ends[0] == "src":
                completion.withdraw = lambda: self._withdraw(completion)
        return Work(completion)

    def completions(self) -> list[Completion]:
        """Return the completions to which the user's works refer."""
        lists = (whole for whole, _ in self.lists)
        members = (completion_of_member(member).visible() for member in self.members)
        each = (*members, *lists, *(loose for loose, _ in self.loose))
        return list(dict.fromkeys(each))

    def note_awaits(self) -> None:
        """Record that the coalescing block awaits all its completions. Works of the accelerator need no such record."""
        members = [member for member in self.members if type(member) is not Work]
        for completion in (*members, *(whole for whole, _ in self.lists), *(loose for loose, _ in self.loose)):
            completion.note_await()

    def deferred(
        self, plan: Plan, arrays: list[Any], facts: tuple[Any, ...], waiters: Any, guard: Any, work: Any
    ) -> DeferredCompletion:
        """Return the completion of a call that the C accelerator has recorded; see `make_completion`."""
        whole = self._wholes.get(work)
        completion: DeferredCompletion
        if whole is None:
            completion = DeferredCompletion.__new__(DeferredCompletion)
        else:
            completion = member = MemberCompletion.__new__(MemberCompletion)
            member.whole = whole
        make_completion(self, None if whole else self._dispatcher, facts, waiters, guard, work, completion)
        completion.plan, completion.arrays = plan, arrays
        return completion

    def add_list(self, whole: DeferredCompletion, members: list[Member]) -> None:
        """Record a list call. Its members, one per array, are calls that have already been recorded."""
        for member in members:
            if type(member) is Work:
                self._wholes[member] = whole
            else:
                member.whole = whole
        self.lists.append((whole, members))

    def is_empty(self) -> bool:
        """Return whether there are no recorded calls to start."""
        return not (self.members or self.loose or self.lists)

    def fail(self, error: BaseException) -> None:
        """Fail all recorded calls with `error`, without starting them."""
        self.flushed, self.native = True, None
        fail([*map(completion_of_member, self.members), *(loose for loose, _ in self.loose)], error)
        self.settle(error)

    def settle(self, error: BaseException | None) -> None:
        """End all list calls, whose members have ended: with `error`, a member's error, or the members' results."""
        for whole, members in self.lists:
            if not whole.done:
                # A member may have failed although the group has not failed.
                wrong = error or next((wrong for wrong in map(_failure, members) if wrong is not None), None)
                if wrong is None:
                    whole.finish([each.result() if type(each) is Work else each.result for each in members])
                else:
                    fail([whole], wrong)
        self.lists = []
        self._wholes = {}

    def _withdraw(self, receive: DeferredCompletion) -> None:
        """Cancel a recorded receive, because the last task that awaited it was cancelled."""
        self.loose = [(each, call) for each, call in self.loose if each is not receive]
        receive.finish(None, asyncio.CancelledError())


class Flusher:
    """The component of a group that starts recorded calls.

    Args:
        dispatcher: dispatcher of the group.

    Attributes:
        intercepted: pending flushes held by an interceptor, which are unknown to the engine.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.intercepted: dict[FlushCompletion, None] = {}
        self._dispatcher = dispatcher
        self._comm = dispatcher.comm
        self._fuser = Fuser(dispatcher.comm, dispatcher.planner)

    def record_natively(self, recording: Recording) -> None:
        """Let the accelerator record calls on NumPy arrays, unless the group fuses small calls."""
        native = self._dispatcher.native
        if native is not None and self._fuser.has_singles:
            recording.native = native.block(recording)

    def flush(self, recording: Recording, outer: Interceptor | None, key: str | None = None) -> FlushCompletion | None:
        """Start the calls of a recording.

        Args:
            recording: the calls.
            outer: interceptor that takes the calls in place of the engine; None without one.
            key: match the flush by this key instead of by a number.

        Returns:
            The completion of the flush; None if it has no members.
        """
        d = self._dispatcher
        wrapper = outer if isinstance(outer, Wrapper) else None
        if wrapper is not None:
            outer = None  # the engine takes the calls, as children of the operations that the wrapper makes
        recording.flushed = True
        native = recording.native
        try:
            d.check()
            layout, members = self._lay_out(recording, outer is None, outer is None and wrapper is None)
            if recording.loose:
                self._start_all_loose(recording.loose, outer, wrapper)
                # Check the group, because a call started above may have revoked the group.
                self._comm.raise_if_revoked()
        except Exception as error:
            d.failures.expect(error)
            recording.fail(error)
            raise
        recording.members, recording.native = [], None
        if not members and not recording.lists:
            return None
        if outer is not None and outer.moves_nothing:
            for bucket in layout.buckets:
                outer.take(self._bucket_call(layout, bucket, [], members, recording.limit, key))
            for member in members:
                member.finish(member.value)
            recording.settle(None)
            return None
        limit = recording.limit if members else self._comm.timeout
        flush: Flush
        if native is None and d.native is not None and layout.singles:
            native = d.native.block(recording)
        identity, seq = d.numbered(key) if outer is None else (0, None)

        def start(number: int, bucket: Bucket, arrays: list[NDArray[Any] | None], ended: Ended) -> None:
            alone = len(layout.buckets) == 1 and outer is None and wrapper is None and key is None
            call = self._bucket_call(layout, bucket, arrays, members, limit, key, alone)
            if outer is None:
                make = _make_bucket_operation(self._comm, call, layout, limit)
                flush.children.start(flush, f"bucket {number} of {identity}", make, ended)
            else:
                _at_end(completion_of(outer.take(call)), ended)

        def make(own: int, each: Completion) -> Flush:
            nonlocal flush
            flush = Flush(self._comm, own, layout, packer, each)
            return flush

        def ended(error: BaseException | None) -> None:
            self.intercepted.pop(completion, None)
            if error is not None:
                packer.fail(error)
            recording.settle(error)

        packer = Packer(self._comm, layout, members, start, outer is not None, native)
        completion = FlushCompletion(d.endpoint, layout.signature.op, packer.pending, ended)
        completion.seq, completion.key = seq, key
        completion.expect((), limit, None)
        if wrapper is not None:
            d.enter(wrapper.wrap(identity, layout.signature, make, completion))
        elif outer is None:
            d.enter(make(identity, completion))
        else:
            self.intercepted[completion] = None
            packer.on_ended = lambda: completion.finish(None)
            packer.advance()
        return completion

    def _lay_out(self, recording: Recording, together: bool, allow_singles: bool) -> tuple[Layout, list[Member]]:
        """Return the layout and members of recorded calls; raise an error if one writes memory that another uses."""
        d, members, native = self._dispatcher, recording.members, recording.native
        if native is None:
            calls = tuple([member.plan or member.call.signature for member in members])
        else:
            recording.limit = min(recording.limit, native.limit)
            plans = zip(native.plans(members), members, strict=True)
            calls = tuple([plan or member.plan or member.call.signature for plan, member in plans])
        layout = self._fuser.layout(calls, together, allow_singles=allow_singles)
        if native is None:
            check_no_overlap(layout, members)
        elif not native.are_disjoint(members):
            members = [*map(completion_of_member, members)]
            check_no_overlap(layout, members)
        else:
            for bucket in layout.buckets:
                if not bucket.single:
                    for position in bucket.members:
                        members[position] = completion_of_member(members[position])
        if d.device_calls is not None:
            check_spans(_device_spans(members, d.rank, d.size), members)
        return layout, members

    def _bucket_call(
        self,
        layout: Layout,
        bucket: Bucket,
        arrays: list[NDArray[Any] | None],
        members: Sequence[DeferredCompletion],
        limit: float,
        key: str | None,
        alone: bool = False,
    ) -> PreparedCall:
        """Return the prepared call for a bucket. `alone` is True for the only bucket of a flush."""
        if bucket.plan is not None:
            return PlannedCall(bucket.plan, arrays, (), None, limit, key)
        own: list[PreparedCall] = [members[position].call for position in bucket.members]
        if len(own) == 1:
            own[0].key = key
            return own[0]
        return FactoryCall(layout.signature, self._dispatcher.make_batch(own, alone), limit, key)  # on device arrays

    def _start_all_loose(
        self,
        calls: Sequence[tuple[DeferredCompletion, PreparedCall]],
        outer: Interceptor | None,
        wrapper: Wrapper | None,
    ) -> None:
        """Start messages and keyed collectives. An error at the start of a call fails only this call."""
        d = self._dispatcher
        with d.batched(array for _, call in calls if isinstance(call, MessageCall) for array in call.arrays or ()):
            for completion, call in calls:
                if outer is not None:
                    completion.unwrap = None
                    _follow(completion_of(outer.take(call)), completion)
                    continue
                try:
                    self._comm.raise_if_revoked()
                    d.enter(self._make_loose(completion, call, wrapper))
                except Exception as error:
                    fail([completion], error)

    def _make_loose(self, completion: DeferredCompletion, call: PreparedCall, wrapper: Wrapper | None) -> Operation:
        """Return the operation of a message or of a keyed collective."""
        if call.signature is None:
            return call.operation(self._comm, P2P, completion)
        identity, completion.seq = self._dispatcher.numbered(call.key)
        if wrapper is None:
            return call.operation(self._comm, identity, completion)
        return wrapper.wrap(identity, call.signature, partial(call.operation, self._comm), completion)


def _failure(member: Member) -> BaseException | None:
    """Return the error of a call that has ended; None if it has succeeded."""
    error: BaseException | None = member.exception() if type(member) is Work else member.exception
    return error


def _make_bucket_operation(comm: Communicator, call: PreparedCall, layout: Layout, limit: float) -> Make:
    """Return a function that makes a bucket's operation, with the signature and fingerprint of the whole flush."""

    def make(identity: int, completion: Completion) -> Operation:
        # A monitored barrier keeps its own timeout, because its error names the missing ranks.
        completion.expect(call.shape, call.limit if call.op == MonitoredBarrier.OP else limit, call.result)
        operation = call.operation(comm, identity, completion)
        operation.signature, operation.fingerprint = layout.signature, layout.fingerprint
        return operation

    return make


def _device_spans(members: Sequence[Member], rank: int, size: int) -> Iterator[Span]:
    """Yield the address ranges of the device arrays of recorded calls."""
    for position, member in enumerate(members):
        call = None if type(member) is Work or member.plan is not None else member.call
        if call is not None and call.is_on_device:
            signature = call.signature
            writes = signature.spec.outputs(rank, size, signature.root)
            for buffer, array in enumerate(call.arrays):
                if array is not None and array.size:
                    yield array.ptr, array.ptr + array.nbytes, position, buffer in writes


def _follow(completion: Completion, follower: DeferredCompletion) -> None:
    """End `follower` when `completion` ends, with the same outcome."""

    def ended(result: Any, error: BaseException | None) -> None:
        follower.source = completion.source
        completion.note_retrieval()
        follower.finish(result, error)

    if not completion.done:
        follower.withdraw = completion.withdraw
    _at_end(completion, ended)


def _at_end(completion: Completion, ended: Ended) -> None:
    """Call `ended` when an intercepted call ends, or immediately if the call has already ended."""
    completion.note_await()
    if completion.done:
        ended(completion.result, completion.exception)
    else:
        completion.add_callback(lambda _: ended(completion.result, completion.exception), None, None)
