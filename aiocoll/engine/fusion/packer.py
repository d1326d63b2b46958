"""Executor of a flush: one operation for the whole flush, and one child operation per bucket or single call.

The flush itself sends no data. It represents the calls of its rank under that sequence number. Its signature is the
list of members, and frames, requests, timeouts and completion reports refer to it. The ids of the buckets are derived
from its id. All children carry the fingerprint of the whole list, so data of a rank with another list is never placed.
Inputs are packed into memory of the endpoint and outputs are unpacked, both for at most `BUDGET` seconds per callback.
No member's array is written before the operation of its bucket is complete.

A single member is carried out without packing. Members that the accelerator carries out are children without an
operation, until Python takes one over.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.engine.fusion.deferred_completion import DeferredCompletion, Member, completion_of_member
from aiocoll.engine.fusion.layout import Bucket, Layout
from aiocoll.engine.job.ids import hash62
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Children, Ended
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import KEYED
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.errors import GroupError
from aiocoll.native.layout import SMALL_SLOTS
from aiocoll.runtime import BUDGET

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Flush", "Packer", "Start", "fail"]

#: Number of calls that the C accelerator starts between two checks of the time, in some 20 microseconds. At most twice
#: as many calls are in flight. If all ranks exchange data in a call, the call ends only after all peers have started
#: it. By then, the peers have finished the calls that used the same slots before, so each call finds a free slot.
PIECE = SMALL_SLOTS // 4

#: A function that starts the operation of a bucket. Arguments: the bucket's number in its flush, the bucket, its
#: arrays, and a callback for the end.
Start = Callable[[int, Bucket, list[NDArray[Any] | None], Ended], None]


class Packer:
    """The scheduler of a flush: it packs the input of each bucket, starts its operation, and unpacks the output.

    Args:
        comm: the communicator.
        layout: layout of the members.
        members: the members, in order. Members of buckets that are not `single` are completions.
        start: starts a bucket.
        foreign: True if an interceptor starts the buckets. It must not be called from a callback of the engine. It may
            leave outputs unchanged, so outputs are filled with the members' content, too. Arrays may be changed after
            its block, so no packing is deferred.
        native: the accelerator's block, which carries out some `single` members; None without the accelerator.

    Attributes:
        layout, members, native: the arguments.
        on_ended: called when all members have ended without a failure of the flush; set before `advance` is called.
        on_mismatch: called with a rank whose members have other counts than those of this rank; set before `advance` is
            called.
    """

    on_ended: Callable[[], None]
    on_mismatch: Callable[[int], None]

    def __init__(
        self,
        comm: Communicator,
        layout: Layout,
        members: Sequence[Member],
        start: Start,
        foreign: bool,
        native: Any = None,
    ) -> None:
        self.done = False
        self.comm = comm
        self.layout = layout
        self.members = members
        self.native = native
        self._start = start
        self._foreign = foreign
        self._jobs: deque[Iterator[object]] = deque(
            self._packing(number, bucket) for number, bucket in enumerate(layout.buckets) if not bucket.single
        )
        self._left = len(self._jobs)
        self._paused: Iterator[object] = iter(())
        self._working = False
        self._put_off = False

    def advance(self) -> None:
        """Continue to pack and unpack buckets, for at most the time of one callback.

        Work that exceeds this callback's time continues in the next loop iteration, unless `foreign`.
        """
        if self._working or self.done:
            return
        self._working = True
        jobs, ticks = self._jobs, self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        try:
            while jobs and not self.done:
                pauses = next(jobs[0], self)
                if pauses is self:
                    jobs.popleft()
                elif pauses:
                    self._paused = jobs.popleft()
                if ticks() > deadline and not self._foreign:
                    break
        except Exception as error:
            self._revoke_group(error)
        self._working = False
        if not self._left and not self.done:
            self.done = True
            self.on_ended()
            self._drop_references()
        self._schedule_next()

    def look(self) -> bool:
        """Continue to pack and unpack while an await polls."""
        self.advance()
        return True

    def fail(self, error: BaseException) -> None:
        """Fail all pending calls of the coalescing block with `error`."""
        self.done = True
        self._jobs.clear()
        self._schedule_next()
        fail([*map(completion_of_member, self.members)], error)
        self._drop_references()

    def pending(self) -> list[Completion]:
        """Return the completions of the user's calls that have not ended."""
        members = map(completion_of_member, self.members)
        return list(dict.fromkeys(member.visible() for member in members if not member.done))

    def add(self, starting: Iterator[bool] | None = None) -> None:
        """Register work outside the buckets, for which the flush also waits until `finish_one` is called.

        Args:
            starting: starts the item, in pieces, before other jobs. A piece returns True to pause until `start_more`.
        """
        self._left += 1
        if starting is not None:
            self._jobs.appendleft(starting)

    def resume(self) -> None:
        """Continue the paused job, which starts more calls."""
        self._jobs.append(self._paused)
        self.advance()

    def finish_one(self) -> None:
        """Record that work registered by `add` has ended."""
        self._left -= 1
        self.advance()

    def _drop_references(self) -> None:
        """Break reference cycles, so that a block's arrays are freed without garbage collection."""
        self._start = self.on_ended = self.on_mismatch = _do_nothing
        self._paused = iter(())

    def _schedule_next(self) -> None:
        """If jobs are left, continue in the next loop iteration, or when an await polls."""
        lookers = self.comm.polling.lookers
        if self.done or not self._jobs:
            lookers.pop(self, None)
            return
        lookers[self] = None
        if not self._put_off:
            self._put_off = True
            self.comm.call_soon(self._resume)

    def _resume(self) -> None:
        self._put_off = False
        self.advance()

    def _revoke_group(self, error: Exception) -> None:
        """Revoke the group after an unexpected error, such as a lack of memory."""
        comm = self.comm
        cause = GroupError(
            f"a flush of group {comm.name!r} failed on rank {comm.rank}: {type(error).__name__}: {error}",
            group=comm.name,
            ranks=[comm.rank],
        )
        cause.__cause__ = error
        comm.revoke(cause)
        if not self.done:
            self.fail(cause)

    # -- one bucket

    def _packing(self, number: int, bucket: Bucket) -> Iterator[None]:
        """Pack a bucket in chunks, and start its operation."""
        members = [self.members[position] for position in bucket.members]
        plan = bucket.plan
        arrays: list[NDArray[Any] | None] = []
        if plan is not None and len(members) == 1:
            arrays = list(members[0].arrays)
        elif plan is not None:
            scratch = self.comm.scratch
            for size in map(bucket.size, range(len(bucket.counts))):
                arrays.append(None if size is None else scratch.take(size, plan.storage))
            inputs = dict.fromkeys((*bucket.reads, *bucket.writes)) if self._foreign else bucket.reads
            yield from bucket.pack(members, arrays, tuple(inputs))
        own = tuple(arrays)

        def ended(result: Any, error: BaseException | None) -> None:
            if not self.done:
                self._bucket_ended(bucket, own, result, error)

        self._start(number, bucket, arrays, ended)
        yield

    def _bucket_ended(
        self, bucket: Bucket, arrays: Sequence[NDArray[Any] | None], result: Any, error: BaseException | None
    ) -> None:
        members = [self.members[position] for position in bucket.members]
        if error is None and len(members) > 1 and bucket.plan is not None:
            self._jobs.append(self._unpacking(bucket, members, arrays))
        else:
            self._left -= 1
            if error is not None:
                fail(members, error)
            elif len(members) == 1:
                members[0].finish(result if bucket.plan is None else members[0].value)
            else:
                for member, outcome in zip(members, result, strict=True):
                    member.finish(outcome)
        self.advance()

    def _unpacking(
        self, bucket: Bucket, members: Sequence[DeferredCompletion], arrays: Sequence[NDArray[Any] | None]
    ) -> Iterator[None]:
        """Unpack a bucket in chunks, unless its stamps show that peers have recorded different calls."""
        wrong = bucket.find_conflict(arrays)
        if wrong is not None:
            self.on_mismatch(wrong)
            return
        yield from bucket.unpack(members, arrays)
        for array in arrays:
            if array is not None:
                self.comm.scratch.give(array)
        self._left -= 1


class Flush(Operation):
    """The operation of one rank that carries out all recorded calls of a coalescing block.

    Args:
        layout: layout of the members.
        packer: packs and unpacks the members.

    Attributes:
        children: the operations of the buckets, and of single members.
    """

    __slots__ = ("_packer", "children")

    def __init__(
        self, comm: Communicator, identity: int, layout: Layout, packer: Packer, completion: Completion
    ) -> None:
        super().__init__(comm, identity, layout.signature, layout.fingerprint, completion)
        self._packer = packer
        self.children = Children()
        packer.on_ended = self._on_packed
        packer.on_mismatch = self._on_mismatch
        if layout.singles:
            packer.add(self._start_singles())

    def enter(self) -> None:
        """Start to pack the buckets."""
        self._packer.advance()

    def algorithm(self) -> str | None:
        """Return the algorithm of the most recently started bucket."""
        return self.children.algorithm

    def needs(self, peer: int) -> bool:
        """Return False, because the operations of the buckets report the peers that they need."""
        return False

    def expire(self) -> None:
        """Handle the expired timeout. If a bucket only waits for a device, the bucket's operation reports the cause."""
        waiting = self.children.find_waiting_for_device()
        if waiting is None:
            super().expire()
        else:
            waiting.expire()

    def fail(self, error: BaseException) -> None:
        """Finish the flush with `error`, and fail all its calls."""
        if self._packer.native is not None:
            self._packer.native.close()
        super().fail(error)
        self.children.fail(error)

    # -- calls that are carried out without packing

    def _start_singles(self) -> Iterator[bool]:
        """Start the calls that are not fused, in several callbacks. Consecutive ids give the calls different slots."""
        singles, members, native = self._packer.layout.singles, self._packer.members, self._packer.native
        first = KEYED | hash62(f"members of {self.id}") >> 1
        algorithm = next(plan.algorithm for plan in reversed(singles) if plan is not None)
        if native is not None:
            native.begin(self, self.id, first, self.id < KEYED)
            for position in range(0, len(singles), PIECE):
                self.children.record_start(self, algorithm, self.comm.stamp())
                native.start(singles, members, position, position + PIECE)
                yield native.pause(PIECE)
            native.end()
        else:
            for position, plan in enumerate(singles):
                if plan is not None:
                    self.start_single(position, first + position)
                    yield False
            self.on_singles_ended(-1)
        yield False

    def start_single(self, position: int, identity: int) -> None:
        """Start a call that is not fused, and that the C accelerator cannot carry out."""
        if self.done:
            return
        plan = self._packer.layout.singles[position]
        assert plan is not None
        member = completion_of_member(self._packer.members[position])
        child = self._single(identity, plan, member.arrays, member)
        self.children.enter(self, child)

    def take_over(
        self,
        identity: int,
        plan: Plan,
        arrays: list[Any],
        member: DeferredCompletion,
        entered: float,
        missing: int,
        has_posted: bool,
    ) -> None:
        """Continue a call that the C accelerator has begun.

        `missing` and `has_posted` are arguments of `SlotProgram.adopt`.
        """
        child = self._single(identity, plan, arrays, member)
        child.entered = entered
        assert isinstance(child, SlotProgram)
        child.adopt(missing, has_posted)

    def _single(self, identity: int, plan: Plan, arrays: list[Any], member: DeferredCompletion) -> Operation:
        def make(own: int, completion: Completion) -> Operation:
            operation = plan.executor(self.comm, own, plan, arrays, completion)
            operation.signature = self.signature
            return operation

        def ended(_: Any, error: BaseException | None) -> None:
            if error is not None:
                fail([member], error)
            else:
                member.finish(member.value)
            self._packer.finish_one()

        self._packer.add()
        return self.children.add(self, identity, make, ended)

    def start_more(self) -> None:
        """Start more calls, because the C accelerator has only a few left to carry out."""
        if not self.done:
            self._packer.resume()

    def start_more_later(self) -> None:
        """Start more calls in the next loop iteration."""
        self.comm.call_soon(self.start_more)

    def on_singles_ended(self, peer: int) -> None:
        """Record that the C accelerator has carried out all its calls. The last call waited for data of `peer`."""
        self.set_waited_for(peer)
        self._packer.finish_one()
        if not self.done:
            self.set_waited_for(-1)

    def on_singles_ended_later(self, peer: int) -> None:
        """Schedule `on_singles_ended` for the next loop iteration."""
        self.comm.call_soon(self.on_singles_ended, peer)

    def _on_packed(self) -> None:
        self.succeed(None)

    def _on_mismatch(self, rank: int) -> None:
        self.comm.mismatches.disagree(rank, self.id, self.describe())


def _do_nothing(*_: object) -> None:
    """Ignore all arguments; used in place of a callback that must not be called any more."""


def fail(members: Sequence[DeferredCompletion], error: BaseException) -> None:
    """Fail `members`, each with its own copy of `error`, because a raised exception accumulates tracebacks."""
    for member in members:
        if not member.done:
            each = error
            if isinstance(error, GroupError):
                each = copy.copy(error)
                each.__cause__ = error.__cause__ or error
            member.finish(None, each)
