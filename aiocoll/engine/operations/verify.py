"""An operation that begins when all ranks have said what they call, and only if their calls belong together.

Each rank sends the description of its call to rank 0, which compares them and answers all with the same verdict: two
steps, and at rank 0 p-1 messages of some 60 bytes each way. If the calls belong together, every rank starts the
operation proper, under an id of its own: what peers that are ahead send for it waits until then. If not, this work
fails on all ranks with the same words, no array has been touched, and the group goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

import msgpack

from aiocoll.engine.operations.base import KEYED, Operation, Signature
from aiocoll.engine.operations.comparison import Difference, compare, packed
from aiocoll.engine.operations.monitored_barrier import Monitored
from aiocoll.engine.operations.object_exchange import Post
from aiocoll.errors import CollectiveMismatchError, GroupError
from aiocoll.work import GOES_ON, Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["Compared", "Inner"]

#: Bytes of a description: counts of thousands of ranks, many times over.
LIMIT = 16 * 1024 * 1024


class Inner(Work[Any]):
    """The work of the operation proper; what comes of it goes to the one that was compared."""

    __slots__ = ("_outer",)

    def __init__(self, outer: Compared) -> None:
        work = outer.work
        self.op, self.seq, self.key, self.group = work.op, work.seq, work.key, None
        self._progress = work._progress
        self._code, self._instruction = work._code, work._instruction
        self._done = False
        self._result = self._exception = self._unwrap = self._withdraw = None
        self._source = self._waiters = self._callbacks = self._unseen = None
        self._outer = outer

    def _finish(self, result: Any, exception: BaseException | None = None) -> None:
        if exception is None and self._unwrap is not None:
            # A call of several steps goes on with the next one.
            unwrap, self._unwrap = self._unwrap, None
            try:
                result = unwrap()
            except Exception as error:
                exception = error
            if result is GOES_ON:
                return
        self._done = True
        self._outer.ended(result, exception)


class Compared(Post):
    """One rank's part in one collective that is compared first.

    Args:
        terms: what the ranks must agree on.
        shape: of the caller's main array.
        make: makes the operation proper, given its id and work.
        wrong: what is wrong with this rank's call, which all others shall hear; there is no operation then.
    """

    MARK = "detail"
    #: The same for all calls, so that no frame is ever refused: what is called stands in the payload.
    FINGERPRINT = Signature("COMPARED", None, (), None, None).fingerprint()

    __slots__ = ("_inner", "_make", "_outcome", "_settled", "_wrong")

    def __init__(
        self,
        group: Communicator,
        identity: int,
        terms: Signature,
        shape: tuple[int, ...],
        make: Callable[[int, Work[Any]], Operation] | None,
        work: Work[Any],
        timeout: float,
        wrong: ValueError | None = None,
    ) -> None:
        sources = group.others if group.rank == 0 else (0,)
        # Marked: reports of it are not compared, and who does not compare is found out.
        if terms.debug != self.MARK:
            terms = terms._replace(debug=self.MARK)
        super().__init__(group, identity, self.FINGERPRINT, terms, shape, sources, LIMIT, work, timeout)
        self._make = make
        self._wrong = wrong
        self._inner: Operation | None = None
        self._settled = False
        self._outcome: tuple[Any, BaseException | None] | None = None

    def enter(self) -> None:
        """Say what this rank calls."""
        mine = self._says()
        if self.group.rank == 0:
            self._incoming[0] = memoryview(mine)
        else:
            self._send({0: mine})
        self._settle()

    def ended(self, result: Any, error: BaseException | None) -> None:
        """The operation proper has ended, or there will be none."""
        self._outcome = result, error
        self._settle()

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived."""
        return sorted(self._missing) if self._inner is None else self._inner.awaited()

    def expire(self) -> None:
        """The timeout has passed; of a monitored barrier its own words tell who has not come."""
        inner = self._inner
        if inner is None and self._make is not None and self.terms.op == Monitored.OP:
            inner = self._make(self.id, Inner(self))
        if isinstance(inner, Monitored):
            inner.blame(self)
        else:
            super().expire()

    def succeed(self, result: Any) -> None:
        """End well."""
        self._inner = None
        super().succeed(result)

    def fail(self, error: BaseException) -> None:
        """End with `error`, and the operation proper too."""
        inner, self._inner = self._inner, None
        super().fail(error)
        if inner is not None:
            inner.fail(error)

    def _says(self) -> bytes:
        """Return what rank 0 is told."""
        return packed(self.describe(), None if self._wrong is None else str(self._wrong))

    def _settle(self) -> None:
        if self.done:
            return
        if not self._settled and not self._missing:
            self._settled = True
            self._conclude()
        # What rank 0 has to say is said before its part is over.
        if self._outcome is None or self._unsent or self.done:
            return
        result, error = self._outcome
        if error is None:
            self.succeed(result)
        else:
            self.fail(error)

    def _conclude(self) -> None:
        """All is known: go on, or fail."""
        group = self.group
        if self._refusal is not None:
            group.revoke(GroupError(f"{self.work.op} was not compared: {self._refusal}", group=group.name))
            return
        found: Difference | None
        if group.rank == 0:
            found = compare(group.name, [self._incoming[rank] for rank in range(len(group.ranks))])
            self._send(dict.fromkeys(group.others, b"" if found is None else msgpack.packb(found)))
        else:
            verdict = self._incoming[0]
            found = Difference(*msgpack.unpackb(verdict)) if verdict else None
        if found is not None:
            self._refuse(found)
        elif self._make is not None:
            self._start(self._make)

    def _start(self, make: Callable[[int, Work[Any]], Operation]) -> None:
        """Start the operation proper, under an id that no key of the user's has: their hashes are of longer texts."""
        group = self.group
        self._inner = inner = make(KEYED | group.endpoint.hash62(str(self.id)), Inner(self))
        # Reports and warnings are of this one.
        inner.warned, inner.reported = True, inf
        group.enter(inner)

    def refused(self) -> None:
        """Note that it fails on all ranks without the group."""
        work = self.work
        if work.seq is not None:
            self.group.refused.add(work.seq if work.key is None else (work.key, work.seq))

    def _refuse(self, found: Difference) -> None:
        group, work = self.group, self.work
        self.refused()
        error = CollectiveMismatchError(
            found.text, op=work.op, seq=work.key or work.seq, group=group.name, ranks=found.ranks
        )
        error.__cause__ = self._wrong
        self.ended(None, error)
