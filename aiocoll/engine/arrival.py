"""A point-to-point message on its way in: what of it is here, and who receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocoll.engine.plan import EAGER_WINDOW
from aiocoll.transport.frame import FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.channel import Channel
    from aiocoll.engine.mailbox import Posted
    from aiocoll.engine.stepwise import Steps

__all__ = ["TAG_LIMIT", "Arrival"]

#: Tags are smaller than this: the operation id has 30 bits for them.
TAG_LIMIT = 1 << 30


class Arrival:
    """A message on its way in, matched or not.

    Attributes:
        offer: number and size of the batch it is part of at its sender, which could send it from device to device;
            None of any other message, and once it has been asked for.
        steps: what reads its object, if somebody has begun to and was cancelled.
    """

    __slots__ = (
        "channel",
        "code",
        "discard",
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

    def __init__(self, channel: Channel, peer: int, header: Header) -> None:
        self.channel = channel
        self.peer = peer
        self.op = header[4]
        self.code = header[5]
        self.total = header[8]
        self.parts: list[bytes] = []
        self.received = 0
        self.held = 0
        self.posted: Posted | None = None
        self.discard = False
        self.steps: Steps | None = None
        self.ready = header[0] == FrameKind.READY
        self.offer = (header[6], header[2]) if self.ready and header[2] else None

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
        """Whether all of it is here."""
        return self.received == self.total

    def ask(self, group: int) -> None:
        """Let the sender send all of it: from its host, then."""
        self.offer = None
        self.channel.control(FrameKind.GRANT, group, self.op)

    def data(self) -> bytes:
        """Take what has gathered."""
        data = b"".join(self.parts)
        self.parts.clear()
        self.channel.consume(self.held)
        self.held = 0
        return data
