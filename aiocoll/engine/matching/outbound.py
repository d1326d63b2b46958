"""A point-to-point message that is being sent, and the signature of both its ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import isnan
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocoll.completion import Completion
from aiocoll.elements.dtypes import by_code
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.incremental import Steps
from aiocoll.engine.operations.signature import P2P, Signature

if TYPE_CHECKING:
    from aiocoll.engine.matching.matching import Matching

__all__ = [
    "OBJECT",
    "SPARSE",
    "Content",
    "OutboundMessage",
    "begun",
    "is_opaque",
    "is_sparse",
    "message_signature",
]

#: The dtype code of a message that is a serialised object.
OBJECT = 255
#: The highest bit of the code of a sparse array, whose other bits depend on its dtype and shape.
SPARSE = 1 << 30


class Content(NamedTuple):
    """The content of a message, at either end.

    Attributes:
        code: of the dtype.
        data: the caller's memory; None where an object or a sparse array is received, which allocates its own.
        read: for a receive of an object: decodes it.
    """

    code: int
    data: memoryview | None
    read: Callable[[memoryview], Steps] | None = None


class OutboundMessage(Operation):
    """A send: done when its bytes have been sent.

    Args:
        sends: those of the group.
        peer: rank it goes to.
        tag: of the message.
        content: what is sent.
    """

    peer: int

    __slots__ = ("_nbytes", "_sends", "_view")

    def __init__(self, sends: Matching, peer: int, tag: int, content: Content, completion: Completion) -> None:
        code, view, _ = content
        assert view is not None
        signature = message_signature("SEND", code, view.nbytes)
        # As the receiver describes it, which knows no more than the count.
        completion.shape = signature.counts
        super().__init__(sends.group, sends.next_id(tag), signature, code, completion)
        self._sends = sends
        self.be_with(peer)
        self._view = view
        self._nbytes = 0

    def enter(self) -> None:
        """Send what the windows allow."""
        self._sends.outgoing[self.peer, self.id] = self
        message = Message(self, 0, 0, self._view, self._view.nbytes)
        self.comm.channels[self.peer].kick(message)

    def sent(self, message: Message, nbytes: int) -> None:
        """Bytes have been sent."""
        self._nbytes += nbytes
        if self._nbytes == message.total and not self.done:
            self._sends.outgoing.pop((self.peer, self.id), None)
            self.succeed(self.completion.value)
        else:
            begun(self)

    def read_from(self, view: memoryview) -> None:
        """Send these bytes, of which no more than the length was known before."""
        self._view = view

    def asked(self) -> None:
        """Its receiver accepts all of it."""
        self.comm.channels[self.peer].grant(self)

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        self._sends.outgoing.pop((self.peer, self.id), None)
        super().fail(error)

    def describe(self) -> dict[str, Any]:
        """Return what is sent and to which rank."""
        return {**super().describe(), "tag": (self.id ^ P2P) >> 32, "dst": self.peer}

    def needs(self, peer: int) -> bool:
        """Whether `peer` is the destination."""
        return peer == self.peer


def begun(operation: Operation) -> None:
    """Record that a message has moved some, but not all, of its bytes."""
    if isnan(operation.started) and not operation.done:
        operation.started = operation.comm.stamp()


def is_sparse(code: int) -> bool:
    """Whether a message is a sparse array."""
    return code >> 30 == 1


def is_opaque(code: int) -> bool:
    """Whether its code does not tell what a message is: of a sparse array, or of elements with a layout."""
    return code >> 30 != 0


@lru_cache(maxsize=256)  # most messages are alike; making a signature costs 5 times as much
def message_signature(op: str, code: int, nbytes: int) -> Signature:
    """Return the signature of a message; `code` is that of its dtype."""
    if code == OBJECT:
        return Signature(op, "object", (), None, None)
    if is_sparse(code):
        return Signature(f"{op}_SPARSE", "sparse", (), None, None)
    dtype = by_code(code)
    return Signature(op, dtype.name, (nbytes // dtype.itemsize,), None, None)
