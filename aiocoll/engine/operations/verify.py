"""Verified operations, which start when all ranks have described their calls, if these calls match.

Each rank sends the description of its call to rank 0. Rank 0 compares them and sends all ranks the same verdict. This
takes two steps, and at rank 0 p-1 messages of some 60 bytes each way. If the calls match, every rank starts the actual
operation as a child with its own id. Data that peers send for the child earlier waits until then. If the calls differ,
the call fails on all ranks with the same text, no array has been changed, and the group stays usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from aiocoll.completion import Completion
from aiocoll.engine.operations.comparison import Difference, compare, packed
from aiocoll.engine.operations.composite import Children, Ended, Make
from aiocoll.engine.operations.monitored_barrier import MonitoredBarrier
from aiocoll.engine.operations.object_exchange import Post
from aiocoll.engine.operations.signature import Signature
from aiocoll.errors import CollectiveMismatchError, GroupError

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["RejectedCall", "VerifiedOperation"]


class VerifiedOperation(Post):
    """The operation of one rank in a collective that is verified before it starts.

    Args:
        signature: the properties that all ranks must agree on.
        make: creates the actual operation.
    """

    MARK = "detail"
    #: The fingerprint of all verified operations. It is the same for all calls, so that frames of a differing call are
    #: accepted: their payload describes the call, which is then compared.
    FINGERPRINT = Signature("COMPARED", None, (), None, None).fingerprint()
    LIMIT = 16 * 1024 * 1024  # maximum bytes of a description: many times the size in a job of thousands of ranks

    __slots__ = ("_children", "_make", "_outcome", "_settled")

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        signature: Signature,
        make: Make | None,
        completion: Completion,
    ) -> None:
        sources = comm.others if comm.rank == 0 else (0,)
        # Mark the signature: ranks that do not verify are then detected, and stall reports do not compare this
        # operation.
        if signature.debug != self.MARK:
            signature = signature._replace(debug=self.MARK)
        super().__init__(comm, identity, signature, sources, completion)
        self._make = make
        #: The child operations; None until the first one starts.
        self._children: Children | None = None
        self._settled = False
        self._outcome: tuple[Any, BaseException | None] | None = None

    def enter(self) -> None:
        """Send the description of this rank's call to rank 0."""
        mine = self._encode_call()
        if self.comm.rank == 0:
            self._incoming[0] = memoryview(mine)
        else:
            self._send({0: mine})
        self._settle()

    def ended(self, result: Any, error: BaseException | None) -> None:
        """Handle the end of the verified collective, or the verdict that the calls differ."""
        self._outcome = result, error
        self._settle()

    def algorithm(self) -> str | None:
        """Return the algorithm of the verified collective; None before it has started."""
        return None if self._children is None else self._children.algorithm

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose data for this operation has not arrived."""
        return self._children.awaited_ranks() if self._children else super().awaited_ranks()

    def expire(self) -> None:
        """Handle the expired timeout. A monitored barrier reports the missing ranks in its own error text."""
        proper = None if self._children is None else self._children.first()
        if proper is None and self._make is not None and self.signature.op == MonitoredBarrier.OP:
            proper = self._make(self.id, self.completion)
        if isinstance(proper, MonitoredBarrier):
            proper.fail_with_missing_ranks(self)
        else:
            super().expire()

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`, and fail the verified collective."""
        super().fail(error)
        if self._children is not None:
            self._children.fail(error)

    def _encode_call(self) -> bytes:
        """Return the encoded description of this rank's call, to be sent to rank 0."""
        return packed(self.describe(), None)

    def _agree(self) -> None:
        """End the verification successfully, because another message has shown that all calls are equal."""
        self._missing.clear()
        self._settled = True

    def _settle(self) -> None:
        if self.done:
            return
        if not self._settled and not self._missing:
            self._settled = True
            self._conclude()
        # Finish only after the verdict has been sent: rank 0 sends it to all other ranks.
        if self._outcome is None or self._unsent or self.done:
            return
        result, error = self._outcome
        if error is None:
            self.succeed(result)
        else:
            self.fail(error)

    def _conclude(self) -> None:
        """Handle the verdict about the calls: start the verified collective, or fail."""
        comm = self.comm
        if self._refusal is not None:
            comm.revoke(GroupError(f"{self.completion.op} was not compared: {self._refusal}", group=comm.name))
            return
        found: Difference | None
        if comm.rank == 0:
            found = compare(comm.name, [self._incoming[rank] for rank in range(len(comm.ranks))])
            self._send(dict.fromkeys(comm.others, b"" if found is None else msgpack.packb(found)))
        else:
            verdict = self._incoming[0]
            found = Difference(*msgpack.unpackb(verdict)) if verdict else None
        if found is not None:
            self._refuse(found)
        elif self._make is not None:
            make, self._make = self._make, None  # the factory may hold the operation that it creates
            self._start(make)

    def _start(self, make: Make) -> None:
        """Start the verified collective."""
        self._start_child(str(self.id), make, self.ended)

    def _start_child(self, name: str, make: Make, ended: Ended) -> None:
        if self._children is None:
            self._children = Children()
        self._children.start(self, name, make, ended)

    def refused(self) -> None:
        """Record that the call fails on all ranks, but that the group stays usable."""
        completion = self.completion
        if completion.seq is not None:
            self.comm.refused.add(completion.seq if completion.key is None else (completion.key, completion.seq))

    def _refuse(self, found: Difference) -> None:
        comm, completion = self.comm, self.completion
        self.refused()
        error = CollectiveMismatchError(
            found.text, op=completion.op, seq=completion.key or completion.seq, group=comm.name, ranks=found.ranks
        )
        self.ended(None, error)


class RejectedCall(VerifiedOperation):
    """A call that this rank cannot carry out. All other ranks receive the reason.

    Args:
        reason: the error that describes the problem.
    """

    __slots__ = ("_reason",)

    def __init__(
        self, comm: Communicator, identity: int, signature: Signature, reason: ValueError, completion: Completion
    ) -> None:
        super().__init__(comm, identity, signature, None, completion)
        self._reason = reason

    def ended(self, result: Any, error: BaseException | None) -> None:
        """Finish with the verdict about the call, which all ranks have received."""
        if error is not None:
            error.__cause__ = self._reason
        super().ended(result, error)

    def _encode_call(self) -> bytes:
        return packed(self.describe(), str(self._reason))
