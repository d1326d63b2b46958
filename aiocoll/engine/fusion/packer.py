"""The executor of a flush: one operation for the flush itself, and a child for each of its buckets or single members.

The flush itself sends nothing. It stands for what its rank called under that number: its signature is the list of
members, and frames, questions, timeouts and reports of completion refer to it. The ids of the buckets are derived from
its id, and all children carry the fingerprint of the whole list, so no byte of a rank with another list is placed.
Inputs are packed into memory of the endpoint and outputs are unpacked, both for `BUDGET` seconds per callback. No
member's array is written before the operation of its bucket is complete.

A single member is carried out as it is. Those that the accelerator carries out are children without an operation, until
Python takes one over.
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

#: Members that the accelerator starts between two looks at the clock: some 20 microseconds. Twice as many are in flight
#: at most. Where all ranks exchange something, a rank that is done with a call knows that its peers have started that,
#: so they are done with those twice as many before it: each call finds its slot free.
AT_ONCE = SMALL_SLOTS // 4

#: Starts the operation of a bucket, numbered in its flush, on these arrays; the last is called at its end.
Start = Callable[[int, Bucket, list[NDArray[Any] | None], Ended], None]


class Packer:
    """Carries out the buckets of a flush.

    Args:
        comm: whose.
        layout: of the members.
        members: in order; those of buckets that are not `single` are completions.
        start: starts a bucket.
        foreign: an interceptor starts the buckets: from no callback of the engine's, and perhaps so that they leave the
            outputs as they are; these are filled, too, with what their members hold. It takes calls for as long as its
            block lasts, and arrays may be changed after it, so nothing is put off.
        native: carries out what it can of the members that are `single`; None: nothing does.

    Attributes:
        layout, members, native: as given.
        ended: called when all members have ended well or by themselves; set before `advance` is called.
        wrong: called with a rank whose members have other counts than those of this rank; likewise.
    """

    ended: Callable[[], None]
    wrong: Callable[[int], None]

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
        """Pack and unpack; what does not fit into this callback's time goes on in the next turn, unless `foreign`."""
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
            self._broke(error)
        self._working = False
        if not self._left and not self.done:
            self.done = True
            self.ended()
            self._let_go()
        self._rest()

    def look(self) -> bool:
        """Go on while an await polls."""
        self.advance()
        return True

    def fail(self, error: BaseException) -> None:
        """End all members that have not ended with `error`."""
        self.done = True
        self._jobs.clear()
        self._rest()
        fail([*map(completion_of_member, self.members)], error)
        self._let_go()

    def pending(self) -> list[Completion]:
        """Return the completions of user calls that have not ended."""
        members = map(completion_of_member, self.members)
        return list(dict.fromkeys(member.visible() for member in members if not member.done))

    def add(self, starting: Iterator[bool] | None = None) -> None:
        """Also wait for something that is not in a bucket, until `end_one`; what starts it, in pieces, goes first.

        A piece returns True to pause until `go_on`.
        """
        self._left += 1
        if starting is not None:
            self._jobs.appendleft(starting)

    def go_on(self) -> None:
        """Go on with what has paused."""
        self._jobs.append(self._paused)
        self.advance()

    def end_one(self) -> None:
        """Something that was added has ended."""
        self._left -= 1
        self.advance()

    def _let_go(self) -> None:
        """Keep nothing that keeps this: all that a block has recorded would stay until garbage is collected."""
        self._start = self.ended = self.wrong = _nothing
        self._paused = iter(())

    def _rest(self) -> None:
        """Let the next turn, or an await that polls, go on if there is more to do."""
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

    def _broke(self, error: Exception) -> None:
        """There was no memory, perhaps."""
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
        """Pack a bucket and start it."""
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
        """Unpack a bucket, unless its stamps say that the peers mean other members."""
        wrong = bucket.wrong(arrays)
        if wrong is not None:
            self.wrong(wrong)
            return
        yield from bucket.unpack(members, arrays)
        for array in arrays:
            if array is not None:
                self.comm.scratch.give(array)
        self._left -= 1


class Flush(Operation):
    """What this rank has called under the number of a flush.

    Args:
        layout: of the members.
        packer: carries it out.

    Attributes:
        children: the operations of the buckets, and of members that are single.
    """

    __slots__ = ("_packer", "children")

    def __init__(
        self, comm: Communicator, identity: int, layout: Layout, packer: Packer, completion: Completion
    ) -> None:
        super().__init__(comm, identity, layout.signature, layout.fingerprint, completion)
        self._packer = packer
        self.children = Children()
        packer.ended = self._packed_out
        packer.wrong = self._differs
        if layout.singles:
            packer.add(self._start_singles())

    def enter(self) -> None:
        """Start packing."""
        self._packer.advance()

    def algorithm(self) -> str | None:
        """Return what carries out the bucket that was started last."""
        return self.children.algorithm

    def needs(self, peer: int) -> bool:
        """Buckets report the peers they need."""
        return False

    def expire(self) -> None:
        """The timeout has passed: a bucket may know better why."""
        hanging = self.children.hanging()
        if hanging is None:
            super().expire()
        else:
            hanging.expire()

    def fail(self, error: BaseException) -> None:
        """End with `error`, and all members."""
        if self._packer.native is not None:
            self._packer.native.close()
        super().fail(error)
        self.children.fail(error)

    # -- members that are carried out by themselves

    def _start_singles(self) -> Iterator[bool]:
        """Start them, in pieces: their ids follow each other, so that each has another slot."""
        singles, members, native = self._packer.layout.singles, self._packer.members, self._packer.native
        first = KEYED | hash62(f"members of {self.id}") >> 1
        algorithm = next(plan.algorithm for plan in reversed(singles) if plan is not None)
        if native is not None:
            native.begin(self, self.id, first, self.id < KEYED)
            for position in range(0, len(singles), AT_ONCE):
                self.children.note_start(self, algorithm, self.comm.stamp())
                native.start(singles, members, position, position + AT_ONCE)
                yield native.pause(AT_ONCE)
            native.end()
        else:
            for position, plan in enumerate(singles):
                if plan is not None:
                    self.start_single(position, first + position)
                    yield False
            self.singles_ended(-1)
        yield False

    def start_single(self, position: int, identity: int) -> None:
        """Start a member that the accelerator does not take."""
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
        """Carry on with a member that the accelerator has begun; the last arguments are as of `SlotProgram.adopt`."""
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
            self._packer.end_one()

        self._packer.add()
        return self.children.add(self, identity, make, ended)

    def go_on(self) -> None:
        """Few members are left that the accelerator has: start more."""
        if not self.done:
            self._packer.go_on()

    def go_on_later(self) -> None:
        """Start more in the next turn of the loop."""
        self.comm.call_soon(self.go_on)

    def singles_ended(self, peer: int) -> None:
        """All that the accelerator had has ended, or was taken over; the last it waited for was `peer`."""
        self.set_waited_for(peer)
        self._packer.end_one()
        if not self.done:
            self.set_waited_for(-1)

    def _packed_out(self) -> None:
        self.succeed(None)

    def _differs(self, rank: int) -> None:
        self.comm.mismatches.disagree(rank, self.id, self.describe())


def _nothing(*_: object) -> None:
    """Nothing is left to do."""


def fail(members: Sequence[DeferredCompletion], error: BaseException) -> None:
    """Fail completions with `error`, each with one of its own: what is raised gathers tracebacks."""
    for member in members:
        if not member.done:
            each = error
            if isinstance(error, GroupError):
                each = copy.copy(error)
                each.__cause__ = error.__cause__ or error
            member.finish(None, each)
