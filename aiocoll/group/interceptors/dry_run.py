"""Interceptor of dry runs: all calls succeed immediately, and nothing is sent."""

from __future__ import annotations

from typing import Any

from aiocoll.completion import Completion
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import P2P, Signature
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.prepared_call import MessageCall, PreparedCall
from aiocoll.work import Work

__all__ = ["DryRun"]


class DryRun:
    """An interceptor that completes the calls of a group whose other ranks do not exist.

    Args:
        dispatcher: of the group.
    """

    moves_nothing = False
    records = False
    native = None

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def take(self, call: PreparedCall) -> Work[Any]:
        """Give the call a sequence number, and complete it immediately, with this rank's data for all other ranks."""
        d = self._dispatcher
        identity, seq = (P2P, None) if call.signature is None else d.numbered(call.key)
        completion = Completion(d.endpoint, call.op, seq, call.key, d)
        call.expect(completion)
        work: Work[Any] = Work(completion)
        if isinstance(call, MessageCall) and call.ends[0] == "src":
            src = call.ends[1]
            completion.source = int(d.rank == 0 < d.size - 1) if src is None else src
        signature = Signature(call.op, None, (), None, None) if call.signature is None else call.signature
        d.enter(_CompletedOperation(d.comm, identity, signature, 0, completion))
        return work


class _CompletedOperation(Operation):
    """An operation that succeeds immediately."""

    __slots__ = ()

    def enter(self) -> None:
        """Succeed immediately."""
        self.succeed(self.completion.value)
