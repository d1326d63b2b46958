"""Messages of a rank to itself: no link carries them, and all else is as between two ranks.

A short one is copied at the send, as long as not more wait than a peer may send without being asked; any other one is
announced, and copied when a receive has matched it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocoll.completion import Completion
from aiocoll.engine.links.flow_control import LEAST, LINK_WINDOW
from aiocoll.engine.matching.outbound import Content, OutboundMessage, begun
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.runtime import BUDGET
from aiocoll.transport.frame import EAGER, SEGMENT, FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.matching.matching import Matching

__all__ = ["Loopback", "MessageToSelf"]


class Loopback:
    """What a channel is to the messages of a peer.

    Args:
        messages: those of the group.
        rank: this one.

    Attributes:
        peer: this rank.
        nbytes: how much waits for receives.
    """

    def __init__(self, messages: Matching, rank: int) -> None:
        self.peer = rank
        self.nbytes = 0
        self._messages = messages

    def control(self, kind: FrameKind, group: int, op: int, amount: int = 0) -> None:
        """Tell the sender that all of a message is wanted, which is all that a receiver tells."""
        if (outgoing := self._messages.outgoing.get((self.peer, op))) is not None:
            outgoing.asked()

    def hold(self, header: Header) -> None:
        """Count a frame that waits."""
        self.nbytes += max(header[7], LEAST)

    def release(self, header: Header) -> None:
        """Stop counting a frame that has waited."""
        self.nbytes -= max(header[7], LEAST)

    def takes(self, nbytes: int) -> bool:
        """Whether a message of that length may wait here."""
        return nbytes <= EAGER_WINDOW and self.nbytes + max(nbytes, LEAST) <= LINK_WINDOW


class MessageToSelf(OutboundMessage):
    """A send to this rank itself: done when its bytes have been copied."""

    __slots__ = ("_copied", "_returns")

    def __init__(self, returns: Matching, peer: int, tag: int, content: Content, completion: Completion) -> None:
        super().__init__(returns, peer, tag, content, completion)
        self._returns = returns
        self._copied = 0

    def enter(self) -> None:
        """Copy it, or announce it."""
        self._sends.outgoing[self.peer, self.id] = self
        if self._returns.loopback.takes(self._view.nbytes):
            self._copy(EAGER)
        else:
            self._deliver(FrameKind.READY, EAGER, 0)

    def asked(self) -> None:
        """A receive has matched it, and may be in the middle of that."""
        self.put_off()

    def advance(self) -> None:
        """Copy as much as a callback may."""
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        while not self.done:
            self._copy(0)
            if not self.done and ticks() > deadline:
                self.put_off()
                return

    def _copy(self, flags: int) -> None:
        nbytes = min(SEGMENT, self._view.nbytes - self._copied)
        self._deliver(FrameKind.DATA, flags, nbytes)
        self._copied += nbytes
        if self.done:  # no receive wants such a message
            return
        if self._copied == self._view.nbytes:
            self._sends.outgoing.pop((self.peer, self.id), None)
            self.succeed(self.completion.value)
        else:
            begun(self)

    def _deliver(self, kind: FrameKind, flags: int, nbytes: int) -> None:
        start, total = self._copied, self._view.nbytes
        header = kind, flags, 0, self.comm.id, self.id, self.fingerprint, start, nbytes, total
        self._returns.deliver(self._returns.loopback, self.peer, header, self._view[start : start + nbytes])
