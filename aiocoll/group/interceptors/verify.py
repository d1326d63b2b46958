"""Interceptor of ``debug="detail"``: all ranks compare their calls before a collective moves data."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.composite import Make
from aiocoll.engine.operations.signature import P2P, Signature
from aiocoll.engine.operations.verify import RejectedCall, VerifiedOperation
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.dispatch.interceptor import Wrapper
from aiocoll.group.prepared_call import PreparedCall
from aiocoll.work import Work

__all__ = ["Verifier"]


class Verifier(Wrapper):
    """An interceptor that compares the calls of all ranks before a collective moves data.

    If op, shape, dtype, device, counts, root or reduce op differ, the await raises `CollectiveMismatchError` on every
    rank. The error lists the different calls. Arrays are unchanged, and the group stays usable. The same applies to a
    list that does not have exactly one entry per rank; other groups raise `ValueError` on this rank alone. Other errors
    in the arguments of one rank raise at the call as usual.

    Every collective completes only when all ranks have called it. Messages between two ranks are not compared.

    Cost: two more steps per collective, through rank 0.

    Args:
        dispatcher: of the group.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def take(self, call: PreparedCall) -> Work[Any]:
        """Start a message immediately, or a collective after all ranks have compared their calls."""
        d = self._dispatcher
        identity, seq = (P2P, None) if call.signature is None else d.numbered(call.key)
        completion = Completion(d.endpoint, call.op, seq, call.key, d)
        call.expect(completion)
        work: Work[Any] = Work(completion)
        d.enter(
            call.operation(d.comm, identity, completion)
            if call.signature is None
            else self.wrap(identity, call.signature, partial(call.operation, d.comm), completion)
        )
        return work

    def wrap(self, identity: int, signature: Signature, make: Make, completion: Completion) -> Operation:
        """Return an operation that compares the ranks' calls, then carries the call out as a child."""
        return VerifiedOperation(self._dispatcher.comm, identity, signature, make, completion)

    def report_wrong_call(
        self, wrong: ValueError, signature: Signature, shape: tuple[int, ...], timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Report a call with wrong arguments to all ranks, by taking part in their comparison of calls."""
        d = self._dispatcher
        d.check()
        limit = d.limit(timeout)
        identity, seq = d.numbered(key)
        completion = Completion(d.endpoint, signature.op, seq, key, d)
        completion.expect(shape, limit, None)
        work: Work[Any] = Work(completion)
        d.enter(RejectedCall(d.comm, identity, signature, wrong, completion))
        return work
