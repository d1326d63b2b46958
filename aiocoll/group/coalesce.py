"""Coalescing: calls of a block that travel together, and the calls on lists of tensors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.causes import failure_by
from aiocoll.engine.fusion.deferred_work import DeferredWork, MemberWork
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.errors import GroupError
from aiocoll.group.calls import Call, Interceptor, Recorder, interceptor_in_scope
from aiocoll.group.collectives import SUM, Collectives
from aiocoll.group.flushing import Flushing, Recording
from aiocoll.group.launch import Timeout
from aiocoll.options import GroupOptions
from aiocoll.work import Work

__all__ = ["Batch", "Coalescing"]


class Batch(Recorder):
    """A block whose calls travel together; made by `ProcessGroup.coalescing`.

    Attributes:
        seq: the number that the last flush has taken, to look up in `completed_everywhere`; None before the first.
    """

    def __init__(self, group: Coalescing) -> None:
        self.seq: int | None = None
        self._group = group
        self._failures: list[DeferredWork] = []
        self._recording = self._new()
        self._started: list[Work[Any]] = []
        self._outer: Interceptor | None = None

    async def __aenter__(self) -> Self:
        group = self._group
        group._check()
        if isinstance(interceptor_in_scope(group), Batch):
            raise RuntimeError(
                f"group {group._member.name!r} is coalescing here already: blocks of one group do not nest. Make the "
                "calls in the outer block, or await one of its works to send what it has recorded"
            )
        # Who would have taken the calls takes what they are fused to.
        self._outer = group._interceptor_here()
        group._batches[self] = None
        group._member.on_revoked.append(self._revoked)
        self._scope = group._scoped(self)
        self._scope.__enter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._scope.__exit__(None, None, None)
        try:
            if error is not None:
                self._drop(error)
                return
            self._flush()
            for work in self._started:
                await _end_of(work)
        finally:
            for work in self._started:
                if not work.done() and work._withdraw is not None and not work._waiters:
                    work._withdraw()
            self._group._member.on_revoked.remove(self._revoked)
            del self._group._batches[self]
        for each in self._failures:
            # A receive that was taken back is nobody's concern any more.
            if not getattr(each, "looked", False) and not isinstance(each._exception, asyncio.CancelledError):
                each.result()

    # -- recording

    def record(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        timeout: float,
        key: str | None,
        unwrap: Callable[[], Any] | None,
        executor: Executor | None,
    ) -> Work[Any]:
        """Record a call on arrays."""
        if key is not None or executor is not None:
            return self.take(self._group._call(plan, arrays, shape, result, timeout, key, unwrap, executor))
        recording = self._recording
        # The user's call is five frames away: the call of the group and what it goes through.
        work = DeferredWork(recording, plan.terms.op, None, None, self._group, 5)
        work.plan = plan
        work.arrays = arrays
        work._shape, work._timeout, work._value = shape, timeout, result
        if unwrap is not None:
            work._unwrap = unwrap
        if timeout < recording.limit:
            recording.limit = timeout
        recording.members.append(work)
        return work

    def take(self, call: Call) -> Work[Any]:
        """Record any other call."""
        if call.key is not None:
            self._group._check_key(call.key)
        return self._recording.keep(call)

    def recorded(self) -> list[Work[Any]]:
        """Return the works of the user's that have not started, or that the engine does not know."""
        return self._recording.works()

    # -- flushing

    def _flush(self) -> None:
        """Start all that is recorded; raise what keeps it from that."""
        recording = self._recording
        if recording.is_empty():
            return
        self._recording = self._new()
        part = self._group._flush(recording, self._outer)
        started = [*self._started, *(work for work, _ in recording.loose), *recording.followed]
        if part is not None:
            self.seq = part.seq
            started.append(part)
        self._started = [work for work in started if not work.done()]

    def _new(self) -> Recording:
        return Recording(self._group, self._flush_quietly, self._failures.append)

    def _flush_quietly(self) -> None:
        """Flush for somebody who awaits a work, and hears of an error there."""
        with contextlib.suppress(Exception):
            self._flush()

    def _drop(self, error: BaseException) -> None:
        """The block has failed: nothing more is sent."""
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        cause = GroupError(
            f"the call was not sent: its coalescing block on rank {self._group._rank} of group "
            f"{self._group._member.name!r} was left by {reason}",
            group=self._group._member.name,
            ranks=[self._group._rank],
        )
        cause.__cause__ = error
        # Whoever left the block knows.
        self._group._failures.expect(error)
        self._recording.fail(cause)

    def _revoked(self) -> None:
        """The group has failed, or this rank has closed it."""
        cause = self._group._member.cause
        self._recording.fail(self._group._closed_error() if cause is None else failure_by(cause))


class Coalescing(Collectives, Flushing):
    """Calls that travel together."""

    def __init__(self, member: Communicator, options: GroupOptions) -> None:
        super().__init__(member, options)
        self._batches: dict[Batch, None] = {}

    def coalescing(self) -> Batch:
        """Record the calls on this group made in the block, and in tasks started in it, and carry them out together.

            async with pg.coalescing():
                for gradient in gradients:
                    pg.allreduce(gradient)

        One operation does what was asked for with the same kind, dtype, op and root. All ranks record the same calls
        in the same order; they take one number together. Leaving the block sends them, and waits for all; awaiting one
        of them inside sends what is recorded at the end of this turn of the loop. The order in which the calls of a
        block are carried out is not defined: none may write where another one reads or writes. Calls on CUDA arrays are
        one group of NCCL calls; what NCCL cannot do is staged, each call by itself.

        If the block is left by an exception, nothing more is sent, and what was not raises from that exception.

        Raises:
            RuntimeError: the block is in another one of the same group.
            ValueError: (when it is sent) two calls share memory that one of them writes.
            CollectiveMismatchError: ranks have recorded different calls; it names some that differ.
        """
        return Batch(self)

    def allreduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = SUM, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Reduce each of `tensors` over all ranks, in place, as one operation per dtype.

        Cost: that of one `allreduce` of all of them, and two copies of each that is small; large ones travel alone.
        """
        _check_list(tensors, "tensors")
        return self._coalesced(
            "ALLREDUCE_COALESCED", lambda: [self.allreduce(each, op, timeout=timeout) for each in tensors], key
        )

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Gather every rank's `inputs[i]` into `outputs[i]`, for all i, as one operation per dtype."""
        pairs = _pairs(outputs, inputs)
        return self._coalesced(
            "ALLGATHER_INTO_TENSOR_COALESCED",
            lambda: [self.allgather_into_tensor(*pair, timeout=timeout) for pair in pairs],
            key,
        )

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        op: ReduceOp = SUM,
        *,
        timeout: Timeout = None,
        key: str | None = None,
    ) -> Work[list[Any]]:
        """Reduce all ranks' `inputs[i]` and leave part r in rank r's `outputs[i]`, for all i."""
        pairs = _pairs(outputs, inputs)
        return self._coalesced(
            "REDUCE_SCATTER_TENSOR_COALESCED",
            lambda: [self.reduce_scatter_tensor(*pair, op, timeout=timeout) for pair in pairs],
            key,
        )

    def _coalesced(self, op: str, calls: Callable[[], list[Work[Any]]], key: str | None) -> Work[list[Any]]:
        """Make `calls` one call, in a block or by itself."""
        self._check()
        if key is not None:
            self._check_key(key)
        block = interceptor_in_scope(self)
        inside = isinstance(block, Batch) and key is None
        recording = block._recording if isinstance(block, Batch) and inside else Recording(self, _nothing)
        before = len(recording.members)
        limit = recording.limit
        try:
            with self._scoped(_Collector(self, recording)):
                calls()
        except BaseException:
            del recording.members[before:]
            recording.limit = limit
            raise
        members = recording.members[before:]
        # The user's call is two frames away.
        whole = DeferredWork(recording, op, None, key, self, 3)
        for member in members:
            assert isinstance(member, MemberWork)
            member.whole = whole
        recording.lists.append((whole, members))
        if not inside:
            part = self._flush(recording, self._interceptor_here(), key)
            whole.seq = None if part is None else part.seq
        return whole

    def _recorded(self) -> list[Work[Any]]:
        """Return the works that the engine does not know: blocks have not sent them, or another taker has them."""
        works = [work for block in self._batches for work in block.recorded()]
        for part in self._taken:
            works += part.stands_for()
        return works


class _Collector(Recorder):
    """Records the calls on a list of tensors: their works are parts of one."""

    def __init__(self, group: Coalescing, recording: Recording) -> None:
        self._group = group
        self._recording = recording

    def record(
        self,
        plan: Plan,
        arrays: list[Any],
        shape: tuple[int, ...],
        result: Any,
        timeout: float,
        key: str | None,
        unwrap: Callable[[], Any] | None,
        executor: Executor | None,
    ) -> Work[Any]:
        """Record a call on arrays."""
        recording = self._recording
        work = MemberWork(recording, plan.terms.op, None, None, self._group, 0)
        if executor is None:
            work.plan = plan
        else:  # on a device
            work.plan = None
            work.call = self._group._call(plan, arrays, shape, result, timeout, key, None, executor)
        work.arrays = arrays
        work._shape, work._timeout, work._value = shape, timeout, result
        work._unwrap = unwrap
        recording.limit = min(recording.limit, timeout)
        recording.members.append(work)
        return work

    def take(self, call: Call) -> Work[Any]:
        """Refuse any other call."""
        raise TypeError("the tensors of a list must be dense arrays")


def _nothing() -> None:
    """What is started by itself need not be flushed."""


def _check_list(tensors: Any, name: str) -> None:
    if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
        raise TypeError(f"{name} must be a list of arrays, not {type(tensors).__name__}")


def _pairs(outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    _check_list(outputs, "outputs")
    _check_list(inputs, "inputs")
    if len(outputs) != len(inputs):
        raise ValueError(f"outputs has {len(outputs)} arrays, inputs has {len(inputs)}: give one output for each input")
    return list(zip(outputs, inputs, strict=True))


async def _end_of(work: Work[Any]) -> None:
    """Wait for a work as an await does, but leave its error to whoever looks."""
    if not work.done():
        work._progress.spin(work)
    if not work.done():
        waiter = work._waiter()
        try:
            await waiter
        except asyncio.CancelledError:
            work._leave(waiter)
            raise
    elif work._progress.turn_is_due():
        await asyncio.sleep(0)
