"""Messages of a rank to itself. They use no link, but follow the rules of messages between two ranks.

A short message is copied at the send, within the window that also limits eager sends of peers. Any other message is
announced, and copied when a receive has matched it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiocoll.completion import Completion
from aiocoll.engine.links.flow_control import LEAST, LINK_WINDOW
from aiocoll.engine.matching.outbound import Content, OutboundMessage, mark_begun
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.runtime import BUDGET
from aiocoll.transport.frame import EAGER, SEGMENT, FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.matching.matching import Matching

__all__ = ["Loopback", "MessageToSelf"]


class Loopback:
    """The channel on which this rank sends messages to itself.

    Args:
        messages: the messages of the group.
        rank: this rank.

    Attributes:
        peer: this rank.
        nbytes: number of bytes that wait for receives.
    """

    def __init__(self, messages: Matching, rank: int) -> None:
        self.peer = rank
        self.nbytes = 0
        self._messages = messages

    def control(self, kind: FrameKind, group: int, op: int, amount: int = 0) -> None:
        """Handle a GRANT frame, the only control frame of a receive: permit the sender to send the whole message."""
        if (outgoing := self._messages.outgoing.get((self.peer, op))) is not None:
            outgoing.on_grant()

    def hold(self, header: Header) -> None:
        """Count a frame as buffered until a receive matches."""
        self.nbytes += max(header[7], LEAST)

    def release(self, header: Header) -> None:
        """Stop counting a frame as buffered."""
        self.nbytes -= max(header[7], LEAST)

    def may_wait(self, nbytes: int) -> bool:
        """Return whether `nbytes` more bytes may be buffered until a receive matches."""
        return nbytes <= EAGER_WINDOW and self.nbytes + max(nbytes, LEAST) <= LINK_WINDOW


class MessageToSelf(OutboundMessage):
    """A send of this rank to itself. It ends when its bytes have been copied."""

    __slots__ = ("_copied", "_returns")

    def __init__(self, returns: Matching, peer: int, tag: int, content: Content, completion: Completion) -> None:
        super().__init__(returns, peer, tag, content, completion)
        self._returns = returns
        self._copied = 0

    def enter(self) -> None:
        """Copy the message to a buffer, or only announce it if too many bytes are buffered."""
        self._sends.outgoing[self.peer, self.id] = self
        if self._returns.loopback.may_wait(self._view.nbytes):
            self._copy(EAGER)
        else:
            self._deliver(FrameKind.READY, EAGER, 0)

    def on_grant(self) -> None:
        """Handle the grant of a matching receive. Copy the bytes later, when the receive has processed the match."""
        self.schedule_advance()

    def advance(self) -> None:
        """Copy as many bytes as one callback has time for."""
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        while not self.done:
            self._copy(0)
            if not self.done and ticks() > deadline:
                self.schedule_advance()
                return

    def _copy(self, flags: int) -> None:
        nbytes = min(SEGMENT, self._view.nbytes - self._copied)
        self._deliver(FrameKind.DATA, flags, nbytes)
        self._copied += nbytes
        if self.done:  # the message has been refused
            return
        if self._copied == self._view.nbytes:
            self._sends.outgoing.pop((self.peer, self.id), None)
            self.succeed(self.completion.value)
        else:
            mark_begun(self)

    def _deliver(self, kind: FrameKind, flags: int, nbytes: int) -> None:
        start, total = self._copied, self._view.nbytes
        header = kind, flags, 0, self.comm.id, self.id, self.fingerprint, start, nbytes, total
        self._returns.deliver(self._returns.loopback, self.peer, header, self._view[start : start + nbytes])
