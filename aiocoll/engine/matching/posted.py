"""Posted receives of point-to-point messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiocoll.codec.limits import MAX_BYTES
from aiocoll.completion import Completion
from aiocoll.engine.matching.inbound import InboundMessage, Receive
from aiocoll.engine.matching.outbound import OBJECT, Content, is_opaque, mark_begun, message_signature
from aiocoll.engine.operations.incremental import Steps, carry_on
from aiocoll.engine.operations.signature import P2P, description
from aiocoll.errors import CollectiveTimeoutError, SerializationError

if TYPE_CHECKING:
    from aiocoll.engine.matching.matching import Matching

__all__ = ["PostedReceive"]


class PostedReceive(Receive):
    """A receive operation, which may be posted before its message arrives.

    Args:
        receives: the messages of the group.
        peer: the rank to receive from; None for any rank.
        tag: tag of the message.
        content: the destination memory, and the expected dtype.
    """

    __slots__ = ("_read", "_receives", "_steps", "arrival", "code", "tag", "view")

    #: The operation's name in error messages.
    OP = "RECV"

    def __init__(
        self, receives: Matching, peer: int | None, tag: int, content: Content, completion: Completion
    ) -> None:
        code, view, self._read = content
        signature = message_signature(self.OP, code, 0 if view is None else view.nbytes)
        super().__init__(receives.group, P2P | tag << 32, signature, code, completion)
        self._receives = receives
        self.set_peer(peer)
        self.tag = tag
        self.view = view
        self.code = code
        self.arrival: InboundMessage | None = None
        self._steps: Steps | None = None
        completion.withdraw = self.withdraw

    def enter(self) -> None:
        """Match this receive with a message that has arrived, or wait for one."""
        self._receives.post(self)

    def describe(self) -> dict[str, Any]:
        """Return this receive as plain data, with tag and source."""
        return {**super().describe(), "tag": self.tag, "src": self.peer}

    def describe_wait(self) -> str:
        """Return a text that describes the data that this receive waits for."""
        if self.arrival is not None:
            return f"rank {self.arrival.peer} has not sent the whole message"
        return f"no message with tag {self.tag} has arrived from {self._source()}"

    def needs(self, peer: int) -> bool:
        """Return whether only `peer` can complete the receive."""
        if self._steps is not None:
            return False
        if self.arrival is not None:
            return self.arrival.peer == peer
        others = set(range(len(self.comm.ranks))) - {self.comm.rank} - self.comm.left
        return self.peer == peer if self.peer is not None else not others

    def claim(self, arrival: InboundMessage) -> None:
        """Bind this receive to the message `arrival`, so that it takes no other message."""
        self.completion.withdraw = None
        self.arrival = arrival

    def set_buffer(self, view: memoryview) -> None:
        """Set the memory into which the message is received."""
        self.view = view

    def match(self, arrival: InboundMessage) -> None:
        """Match this receive with the message `arrival`, and take the bytes that have arrived."""
        self.claim(arrival)
        arrival.posted = self
        if arrival.code == self.code == OBJECT:
            if arrival.total > MAX_BYTES:
                self._refuse(arrival)
                return
            self.view = memoryview(bytearray(arrival.total))
        elif self.view is None or arrival.code != self.code or arrival.total != self.view.nbytes:
            arrival.discard = True
            if is_opaque(arrival.code):  # only the sender can describe the message
                self.comm.mismatches.disagree(arrival.peer, arrival.op, self.describe())
                return
            number = arrival.op & 0xFFFFFFFF
            signature = message_signature("SEND", arrival.code, arrival.total)
            theirs = description(arrival.peer, signature, signature.counts, None, number)
            theirs.update(tag=self.tag, dst=self.comm.rank)
            self.comm.mismatches.differ({**self.describe(), "seq": number}, theirs)
            return
        if arrival.received:
            self.view[: arrival.received] = arrival.data()
        else:
            arrival.release()
        if arrival.complete:
            self.complete()
            return
        if arrival.received:
            mark_begun(self)
        if arrival.is_grant_pending:
            arrival.grant(self.comm.id)

    def complete(self) -> None:
        """Handle the arrival of the message's last byte."""
        assert self.arrival is not None
        self.completion.source = self.arrival.peer
        self.set_waited_for(self.arrival.peer)
        self._receives.forget(self.arrival)
        self.finish()

    def finish(self) -> None:
        """Finish successfully. If the message contains an object, decode it first."""
        if self._read is None or self.view is None:
            self.succeed(self.completion.value)
        else:
            self._steps = self._read(self.view)
            carry_on(self, self._steps)

    def advance(self) -> None:
        """Continue decoding an object."""
        if self._steps is not None:
            carry_on(self, self._steps)

    def withdraw(self) -> None:
        """Remove an unmatched receive that no task awaits, as if it had never been posted."""
        self.fail(asyncio.CancelledError())

    def expire(self) -> None:
        """Handle the expired timeout. If no message has matched, only this receive fails."""
        if self.arrival is not None:
            super().expire()
            return
        self.fail(
            CollectiveTimeoutError(
                f"rank {self.comm.rank} of group {self.comm.name!r} received no message with tag {self.tag} from "
                f"{self._source()} within {self.timeout:g} s",
                op=self.completion.op,
                group=self.comm.name,
                ranks=[] if self.peer is None else [self.peer],
            )
        )

    def succeed(self, result: Any) -> None:
        """Finish successfully, and drop the reference to the message, to break a reference cycle."""
        super().succeed(result)
        self.arrival = None

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`. The rest of a matched message is dropped."""
        self._receives.withdraw(self)
        super().fail(error)

    def _source(self) -> str:
        return "any rank" if self.peer is None else f"rank {self.peer}"

    def _refuse(self, arrival: InboundMessage) -> None:
        self.fail(
            SerializationError(
                f"rank {arrival.peer} sent an object of {arrival.total} bytes; the limit is {MAX_BYTES} bytes"
            )
        )
        arrival.data()
        if arrival.complete:
            self._receives.forget(arrival)
        else:
            arrival.grant(self.comm.id)
