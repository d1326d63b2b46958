"""A point-to-point message that is being received: how much of it has arrived, and its receive."""

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

#: Tags are smaller than this: the operation id has 30 bits for them.
TAG_LIMIT = 1 << 30


class Receive(Operation):
    """The receiving end of a message.

    Attributes:
        view: its destination; None as long as there is no memory.
    """

    view: memoryview | None

    __slots__ = ()

    def complete(self) -> None:
        """All bytes have arrived."""
        raise NotImplementedError


class InboundMessage:
    """A message that is being received, matched or not.

    Attributes:
        held: headers of its frames that wait here.
        asked: its sender was allowed to send all of it.
        empty: it has no bytes, so it exists only once a frame has arrived.
        offer: number and size of its batch at its sender, which could send it from device to device;
            None of any other message, and once it has been asked for.
        steps: the decoding of its object, if that was begun and then cancelled.
    """

    __slots__ = (
        "asked",
        "channel",
        "code",
        "discard",
        "empty",
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
        self.asked = False
        self.posted: Receive | None = None
        self.discard = False
        self.steps: Steps | None = None
        self.ready = header[0] == FrameKind.READY
        self.offer = (header[6], header[2]) if self.ready and header[2] else None
        self.empty = self.ready and not self.total
        if self.op & KEYED or self.total % _itemsize(self.code):
            raise ProtocolError(f"rank {peer} sent {self.total} bytes as message {self.op:#x} of dtype {self.code}")

    @property
    def withheld(self) -> bool:
        """Whether its sender waits for a grant, now or soon."""
        return self.ready or self.total > EAGER_WINDOW

    @property
    def tag(self) -> int:
        """The tag, from the operation id."""
        return self.op >> 32 & (TAG_LIMIT - 1)

    @property
    def complete(self) -> bool:
        """Whether all of it has arrived."""
        return self.received == self.total and not self.empty

    def ask(self, comm: int) -> None:
        """Allow the sender to send all of it: from host memory, then."""
        self.offer = None
        self.asked = True
        self.channel.control(FrameKind.GRANT, comm, self.op)

    def hold(self, header: Header) -> None:
        """Count a frame that waits here, unless the sender was asked for it."""
        if header[1] & EAGER or not self.asked:
            self.channel.hold(header)
            self.held.append(header)

    def release(self) -> None:
        """Stop counting its frames as waiting."""
        held, self.held = self.held, []
        for header in held:
            self.channel.release(header)

    def data(self) -> bytes:
        """Remove and return the bytes that have arrived."""
        data = b"".join(self.parts)
        self.parts.clear()
        self.release()
        return data


def _itemsize(code: int) -> int:
    """Return the bytes of an element of a message, 1 if unknown; `ValueError` if there is no such dtype."""
    return 1 if code == OBJECT or is_opaque(code) else by_code(code).itemsize
