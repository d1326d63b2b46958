"""Point-to-point sends, and the signature that both ends of a message compare."""

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

#: The dtype code of messages that contain a serialised object.
OBJECT = 255
#: The highest bit of a dtype code marks a sparse array. The other bits depend on its dtype and shape.
SPARSE = 1 << 30


class Content(NamedTuple):
    """The content of a message at its sender or receiver: dtype code and memory.

    Attributes:
        code: code of the dtype.
        data: the caller's memory; None to receive an object or a sparse array, for which memory is allocated later.
        read: decodes a received object; None for arrays and for sends.
    """

    code: int
    data: memoryview | None
    read: Callable[[memoryview], Steps] | None = None


class OutboundMessage(Operation):
    """A send operation. It ends when all bytes have been sent.

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
        # The receiver only knows the number of elements. Use it as the shape, so that error texts of both ranks agree.
        completion.shape = signature.counts
        super().__init__(sends.group, sends.next_id(tag), signature, code, completion)
        self._sends = sends
        self.set_peer(peer)
        self._view = view
        self._nbytes = 0

    def enter(self) -> None:
        """Send as many bytes as the windows of link and receiver allow."""
        self._sends.outgoing[self.peer, self.id] = self
        message = Message(self, 0, 0, self._view, self._view.nbytes)
        self.comm.channels[self.peer].enqueue(message)

    def sent(self, message: Message, nbytes: int) -> None:
        """Record that `nbytes` more bytes of `message` have been sent."""
        self._nbytes += nbytes
        if self._nbytes == message.total and not self.done:
            self._sends.outgoing.pop((self.peer, self.id), None)
            self.succeed(self.completion.value)
        else:
            mark_begun(self)

    def read_from(self, view: memoryview) -> None:
        """Set the memory to send from. Until now, only its size was known."""
        self._view = view

    def on_grant(self) -> None:
        """Handle the receiver's permission to send the whole message."""
        self.comm.channels[self.peer].grant(self)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`."""
        self._sends.outgoing.pop((self.peer, self.id), None)
        super().fail(error)

    def describe(self) -> dict[str, Any]:
        """Return this send as plain data, with tag and destination."""
        return {**super().describe(), "tag": (self.id ^ P2P) >> 32, "dst": self.peer}

    def needs(self, peer: int) -> bool:
        """Return whether the send needs `peer`, that is, whether `peer` is the destination."""
        return peer == self.peer


def mark_begun(operation: Operation) -> None:
    """Record the time at which a part of a message, but not all of it, was first transferred."""
    if isnan(operation.started) and not operation.done:
        operation.started = operation.comm.stamp()


def is_sparse(code: int) -> bool:
    """Return whether a dtype code stands for a sparse array."""
    return code >> 30 == 1


def is_opaque(code: int) -> bool:
    """Return whether a dtype code stands for several dtypes: those of sparse arrays, or structured dtypes."""
    return code >> 30 != 0


@lru_cache(maxsize=256)  # most messages have equal signatures, and a lookup takes a fifth of the time to make one
def message_signature(op: str, code: int, nbytes: int) -> Signature:
    """Return the signature of a message; `code` is the code of its dtype."""
    if code == OBJECT:
        return Signature(op, "object", (), None, None)
    if is_sparse(code):
        return Signature(f"{op}_SPARSE", "sparse", (), None, None)
    dtype = by_code(code)
    return Signature(op, dtype.name, (nbytes // dtype.itemsize,), None, None)
