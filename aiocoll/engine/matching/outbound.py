"""Outbound point-to-point messages, and the signature of both ends of a message."""

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
    "is_opaque",
    "is_sparse",
    "mark_begun",
    "message_signature",
]

#: The dtype code of a message that contains a serialised object.
OBJECT = 255
#: The highest bit in the dtype code of a sparse array. The other bits depend on its dtype and shape.
SPARSE = 1 << 30


class Content(NamedTuple):
    """The content of a message, at either end.

    Attributes:
        code: code of the dtype.
        data: the caller's memory; None to receive an object or a sparse array, for which memory is allocated later.
        read: decodes a received object; None for arrays and for sends.
    """

    code: int
    data: memoryview | None
    read: Callable[[memoryview], Steps] | None = None


class OutboundMessage(Operation):
    """A send. It ends when its bytes have been sent.

    Args:
        sends: the messages of the group.
        peer: the destination rank.
        tag: tag of the message.
        content: the data to send.
    """

    peer: int

    __slots__ = ("_nbytes", "_sends", "_view")

    def __init__(self, sends: Matching, peer: int, tag: int, content: Content, completion: Completion) -> None:
        code, view, _ = content
        assert view is not None
        signature = message_signature("SEND", code, view.nbytes)
        # The same shape as in the receiver's description. The receiver only knows the count.
        completion.shape = signature.counts
        super().__init__(sends.group, sends.next_id(tag), signature, code, completion)
        self._sends = sends
        self.set_peer(peer)
        self._view = view
        self._nbytes = 0

    def enter(self) -> None:
        """Send as many bytes as the windows allow."""
        self._sends.outgoing[self.peer, self.id] = self
        message = Message(self, 0, 0, self._view, self._view.nbytes)
        self.comm.channels[self.peer].enqueue(message)

    def sent(self, message: Message, nbytes: int) -> None:
        """Handle the sending of `nbytes` more bytes of `message`."""
        self._nbytes += nbytes
        if self._nbytes == message.total and not self.done:
            self._sends.outgoing.pop((self.peer, self.id), None)
            self.succeed(self.completion.value)
        else:
            mark_begun(self)

    def read_from(self, view: memoryview) -> None:
        """Set the bytes to send. Before, only their number was known."""
        self._view = view

    def on_grant(self) -> None:
        """Handle the receiver's permission to send the whole message."""
        self.comm.channels[self.peer].grant(self)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        self._sends.outgoing.pop((self.peer, self.id), None)
        super().fail(error)

    def describe(self) -> dict[str, Any]:
        """Return the call as plain data, with tag and destination."""
        return {**super().describe(), "tag": (self.id ^ P2P) >> 32, "dst": self.peer}

    def needs(self, peer: int) -> bool:
        """Return whether `peer` is the destination."""
        return peer == self.peer


def mark_begun(operation: Operation) -> None:
    """Record the start of a message that has moved some, but not all, of its bytes."""
    if isnan(operation.started) and not operation.done:
        operation.started = operation.comm.stamp()


def is_sparse(code: int) -> bool:
    """Return whether the message is a sparse array."""
    return code >> 30 == 1


def is_opaque(code: int) -> bool:
    """Return whether the code does not identify the dtype. It belongs to a sparse array or a structured dtype then."""
    return code >> 30 != 0


@lru_cache(maxsize=256)  # most messages have the same signature, and making one takes 5 times as long as a lookup
def message_signature(op: str, code: int, nbytes: int) -> Signature:
    """Return the signature of a message; `code` is that of its dtype."""
    if code == OBJECT:
        return Signature(op, "object", (), None, None)
    if is_sparse(code):
        return Signature(f"{op}_SPARSE", "sparse", (), None, None)
    dtype = by_code(code)
    return Signature(op, dtype.name, (nbytes // dtype.itemsize,), None, None)
