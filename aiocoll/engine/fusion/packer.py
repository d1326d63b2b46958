"""The executor of a flush: an operation of its own number, and one more for each of its buckets.

The flush itself sends nothing. It is what its rank has called under that number: its terms are the list of members, and
frames, questions, timeouts and what is complete refer to it. The buckets have ids derived from its own, and all carry
the fingerprint of the whole list, so no byte of a rank with another list is placed. Inputs are packed into memory of
the endpoint, outputs unpacked, both for `BUDGET` seconds per callback. No member's array is written before the
operation of its bucket is complete.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from aiocoll.engine.fusion.deferred_work import BucketWork, DeferredWork
from aiocoll.engine.fusion.layout import Bucket, Layout
from aiocoll.engine.operations.base import Operation
from aiocoll.errors import GroupError
from aiocoll.runtime import BUDGET
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Flush", "Fusion", "Start", "fail"]

#: Starts the operation of a bucket, numbered in its flush, on these arrays; its end is that of the part.
Start = Callable[[int, Bucket, list[NDArray[Any] | None], BucketWork], None]


class Fusion:
    """Carries out the buckets of a flush.

    Args:
        group: whose.
        layout: of the members.
        members: in order.
        start: starts a bucket.
        ended: called when all members have ended well or by themselves.
        foreign: another taker starts the buckets: from no callback of the engine's, and perhaps so that they leave the
            outputs as they are; these are filled, too, with what their members hold.
    """

    def __init__(
        self,
        group: Communicator,
        layout: Layout,
        members: Sequence[DeferredWork],
        start: Start,
        ended: Callable[[], None],
        foreign: bool = False,
    ) -> None:
        self.done = False
        self.group = group
        self._members = members
        self._start = start
        self._ended = ended
        self._foreign = foreign
        self._left = len(layout.buckets)
        self._running: dict[BucketWork, None] = {}
        self._jobs: deque[Iterator[None]] = deque(
            self._packing(number, bucket) for number, bucket in enumerate(layout.buckets)
        )
        self._working = False
        self._put_off = False

    def advance(self) -> None:
        """Pack and unpack; what does not fit into this callback's time goes on in the next turn."""
        if self._working or self.done:
            return
        self._working = True
        jobs, ticks = self._jobs, self.group.endpoint.runtime.ticks
        deadline = ticks() + BUDGET
        try:
            while jobs and not self.done:
                if next(jobs[0], self) is self:
                    jobs.popleft()
                if ticks() > deadline:
                    break
        except Exception as error:
            self._broke(error)
        self._working = False
        if not self._left and not self.done:
            self.done = True
            self._ended()
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
        fail(self._members, error)

    def pending(self) -> list[Work[Any]]:
        """Return the works of the user's that have not ended."""
        return list(dict.fromkeys(member.visible() for member in self._members if not member.done()))

    def hanging(self) -> Operation | None:
        """Return a bucket's operation that hangs on this rank, if one does."""
        started = (part.operation for part in self._running)
        return next((each for each in started if each is not None and each.hangs_here()), None)

    def _rest(self) -> None:
        """Let the next turn, or an await that polls, go on if there is more to do."""
        lookers = self.group.endpoint.polling.lookers
        if self.done or not self._jobs:
            lookers.pop(self, None)
            return
        if not self._foreign:
            lookers[self] = None
        if not self._put_off:
            self._put_off = True
            self.group.call_soon(self._resume)

    def _resume(self) -> None:
        self._put_off = False
        self.advance()

    def _broke(self, error: Exception) -> None:
        """There was no memory, perhaps."""
        group = self.group
        cause = GroupError(
            f"a flush of group {group.name!r} failed on rank {group.rank}: {type(error).__name__}: {error}",
            group=group.name,
            ranks=[group.rank],
        )
        cause.__cause__ = error
        group.revoke(cause)
        if not self.done:
            self.fail(cause)

    # -- one bucket

    def _packing(self, number: int, bucket: Bucket) -> Iterator[None]:
        """Pack a bucket and start it."""
        members = [self._members[position] for position in bucket.members]
        plan = bucket.plan
        arrays: list[NDArray[Any] | None] = []
        if plan is not None and len(members) == 1:
            arrays = list(members[0].arrays)
        elif plan is not None:
            scratch = self.group.endpoint.scratch
            for size in map(bucket.size, range(len(bucket.counts))):
                arrays.append(None if size is None else scratch.take(size, plan.storage))
            inputs = dict.fromkeys((*bucket.reads, *bucket.writes)) if self._foreign else bucket.reads
            yield from bucket.pack(members, arrays, tuple(inputs))
        own = tuple(arrays)

        def ended(result: Any, error: BaseException | None) -> None:
            del self._running[part]
            if not self.done:
                self._bucket_ended(bucket, members, own, part, result, error)

        name = plan.terms.op if plan is not None else members[0].op if len(members) == 1 else "COALESCED"
        part = BucketWork(self.group.endpoint, name, None, None, members[0].group, tuple, ended)
        self._running[part] = None
        self._start(number, bucket, arrays, part)
        yield

    def _bucket_ended(
        self,
        bucket: Bucket,
        members: Sequence[DeferredWork],
        arrays: Sequence[NDArray[Any] | None],
        part: BucketWork,
        result: Any,
        error: BaseException | None,
    ) -> None:
        if error is None and len(members) > 1 and bucket.plan is not None:
            self._jobs.append(self._unpacking(bucket, members, arrays, part))
        else:
            self._left -= 1
            if error is not None:
                fail(members, error)
            elif len(members) == 1:
                members[0]._finish(result if bucket.plan is None else members[0].outcome)
            else:
                for member, outcome in zip(members, result, strict=True):
                    member._finish(outcome)
        self.advance()

    def _unpacking(
        self, bucket: Bucket, members: Sequence[DeferredWork], arrays: Sequence[NDArray[Any] | None], part: BucketWork
    ) -> Iterator[None]:
        """Unpack a bucket, unless its stamps say that the peers mean other members."""
        wrong = bucket.wrong(arrays)
        if wrong is not None:
            operation = part.operation
            assert operation is not None
            self.group.mismatches.disagree(wrong, operation.id, operation.describe())
            return
        yield from bucket.unpack(members, arrays)
        for array in arrays:
            if array is not None:
                self.group.endpoint.scratch.give(array)
        self._left -= 1


class Flush(Operation):
    """What this rank has called under the number of a flush."""

    __slots__ = ("fusion",)

    fusion: Fusion

    def enter(self) -> None:
        """Start packing."""
        self.fusion.advance()

    def needs(self, peer: int) -> bool:
        """It is for the buckets to say."""
        return False

    def expire(self) -> None:
        """The timeout has passed: a bucket may know better why."""
        hanging = self.fusion.hanging()
        if hanging is None:
            super().expire()
        else:
            hanging.expire()


def fail(members: Sequence[DeferredWork], error: BaseException) -> None:
    """End works with `error`, each with one of its own: what is raised gathers tracebacks."""
    for member in members:
        if not member.done():
            each = error
            if isinstance(error, GroupError):
                each = copy.copy(error)
                each.__cause__ = error.__cause__ or error
            member._finish(None, each)
