"""Arriving point-to-point messages, and the base class of receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocoll.elements.dtypes import by_code
from aiocoll.engine.matching.outbound import OBJECT, is_opaque
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.incremental import Steps
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.engine.operations.signature import KEYED
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import EAGER, FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.links.channel import Channel
    from aiocoll.engine.matching.to_self import Loopback

__all__ = ["TAG_LIMIT", "InboundMessage", "Receive"]

#: Tags are below this limit: the operation id has 30 bits for the tag.
TAG_LIMIT = 1 << 30


class Receive(Operation):
    """Base class of the receive operations of point-to-point messages.

    Attributes:
        view: the destination; None as long as no memory is allocated.
    """

    view: memoryview | None

    __slots__ = ()

    def complete(self) -> None:
        """Handle the arrival of the message's last byte."""
        raise NotImplementedError


class InboundMessage:
    """An arriving message, with or without a matching receive.

    Attributes:
        held: headers of its frames that wait here.
        granted: True if the sender has received permission to send the whole message.
        empty: True for a message without bytes before its data frame has arrived.
        offer: number and size of the sender's batch, if the sender can transfer the message from device to device. None
            for other messages, and once the message has been requested from host memory.
        steps: the decoding of its object, if a receive has started it and was then cancelled.
    """

    __slots__ = (
        "channel",
        "code",
        "discard",
        "empty",
        "granted",
        "held",
        "offer",
        "op",
        "parts",
        "peer",
        "posted",
        "ready",
        "received",
        "steps",
        "total",
    )

    def __init__(self, channel: Channel | Loopback, peer: int, header: Header) -> None:
        self.channel = channel
        self.peer = peer
        self.op = header[4]
        self.code = header[5]
        self.total = header[8]
        self.parts: list[bytes] = []
        self.received = 0
        self.held: list[Header] = []
        self.granted = False
        self.posted: Receive | None = None
        self.discard = False
        self.steps: Steps | None = None
        self.ready = header[0] == FrameKind.READY
        self.offer = (header[6], header[2]) if self.ready and header[2] else None
        self.empty = self.ready and not self.total
        if self.op & KEYED or self.total % _itemsize(self.code):
            raise ProtocolError(
                f"rank {peer} sent an invalid message {self.op:#x}: {self.total} bytes of dtype code {self.code}"
            )

    @property
    def is_grant_pending(self) -> bool:
        """Return whether the sender waits, or will wait, for a grant."""
        return self.ready or self.total > EAGER_WINDOW

    @property
    def tag(self) -> int:
        """The message's tag, taken from the operation id."""
        return self.op >> 32 & (TAG_LIMIT - 1)

    @property
    def complete(self) -> bool:
        """Return whether the whole message has arrived."""
        return self.received == self.total and not self.empty

    def grant(self, comm: int) -> None:
        """Permit the sender to send the whole message from host memory."""
        self.offer = None
        self.granted = True
        self.channel.control(FrameKind.GRANT, comm, self.op)

    def hold(self, header: Header) -> None:
        """Count a frame of the message as buffered, unless the receiver had permitted the sender to send it."""
        if header[1] & EAGER or not self.granted:
            self.channel.hold(header)
            self.held.append(header)

    def release(self) -> None:
        """Stop counting the frames of the message as buffered."""
        held, self.held = self.held, []
        for header in held:
            self.channel.release(header)

    def data(self) -> bytes:
        """Remove and return the buffered bytes of the message."""
        data = b"".join(self.parts)
        self.parts.clear()
        self.release()
        return data


def _itemsize(code: int) -> int:
    """Return the bytes per element of a message; 1 for dtypes that the code does not identify."""
    return 1 if code == OBJECT or is_opaque(code) else by_code(code).itemsize
