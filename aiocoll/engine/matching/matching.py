"""Point-to-point messages: matched by source and tag, in the order in which they were sent.

A message that meets no receive waits here, at most an eager window of it; the rest stays with its sender until a
receive matches. `PostedReceive` is a receive; for a send, see `aiocoll.engine.matching.outbound`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from aiocoll.codec.limits import MAX_BYTES
from aiocoll.engine.matching.inbound import InboundMessage
from aiocoll.engine.matching.outbound import OBJECT, Content, OutboundMessage, begun, message_terms
from aiocoll.engine.operations.base import P2P, Operation, description
from aiocoll.engine.operations.incremental import Steps, carry_on
from aiocoll.engine.operations.operation_log import PEER
from aiocoll.errors import CollectiveTimeoutError, ProtocolError, SerializationError
from aiocoll.transport.frame import FrameKind, Header
from aiocoll.work import Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.links.channel import Channel

__all__ = ["Matching", "PostedReceive"]

K = TypeVar("K")


class PostedReceive(Operation):
    """A receive.

    Args:
        peer: rank it takes a message from; None takes the first one with the tag.
        tag: of the message.
        content: where it goes, and what it must be.
    """

    __slots__ = ("_read", "_steps", "arrival", "code", "peer", "tag", "view")

    def __init__(self, comm: Communicator, peer: int | None, tag: int, content: Content, work: Work[Any]) -> None:
        code, view, self._read = content
        terms = message_terms("RECV", code, 0 if view is None else view.nbytes)
        super().__init__(comm, P2P | tag << 32, terms, code, work)
        self.peer = peer
        self.tag = tag
        self.view = view
        self.code = code
        self.arrival: InboundMessage | None = None
        self._steps: Steps | None = None
        work._withdraw = self.withdraw

    def enter(self) -> None:
        """Take a message that is waiting, or wait for one."""
        self.comm.matching.post(self)

    def describe(self) -> dict[str, Any]:
        """Say what is wanted, and from where."""
        return {**super().describe(), "tag": self.tag, "src": self.peer}

    def standing(self) -> str:
        """Say what it waits for."""
        if self.arrival is not None:
            return f"rank {self.arrival.peer} has not sent all of it"
        return f"no message with tag {self.tag} has come from {self._source()}"

    def needs(self, peer: int) -> bool:
        """Whether only `peer` could complete it."""
        if self._steps is not None:
            return False
        if self.arrival is not None:
            return self.arrival.peer == peer
        others = set(range(len(self.comm.ranks))) - {self.comm.rank} - self.comm.left
        return self.peer == peer if self.peer is not None else not others

    def match(self, arrival: InboundMessage) -> None:
        """Become the receiver of `arrival`."""
        self.work._withdraw = None
        self.arrival = arrival
        arrival.posted = self
        if self.view is None and arrival.code == OBJECT:
            if arrival.total > MAX_BYTES:
                self._refuse(arrival)
                return
            self.view = memoryview(bytearray(arrival.total))
        elif self.view is None or arrival.code != self.code or arrival.total != self.view.nbytes:
            arrival.discard = True
            number = arrival.op & 0xFFFFFFFF
            terms = message_terms("SEND", arrival.code, arrival.total)
            theirs = description(arrival.peer, terms, terms.counts, None, number)
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
            begun(self)
        if arrival.withheld:
            arrival.ask(self.comm.id)

    def complete(self) -> None:
        """All bytes are here."""
        assert self.arrival is not None
        self.work._source = self.arrival.peer
        if self.peer is None:
            self.entry[PEER] = self.arrival.peer
        self.comm.matching.forget(self.arrival)
        if self._read is None or self.view is None:
            self.succeed(self.work._value)
        else:
            self._steps = self._read(self.view)
            carry_on(self, self._steps)

    def advance(self) -> None:
        """Go on reading an object."""
        if self._steps is not None:
            carry_on(self, self._steps)

    def withdraw(self) -> None:
        """Nobody waits for it any more and no message has matched: as if it had never been posted."""
        self.fail(asyncio.CancelledError())

    def expire(self) -> None:
        """Without a message, only this receive fails."""
        if self.arrival is not None:
            super().expire()
            return
        self.fail(
            CollectiveTimeoutError(
                f"rank {self.comm.rank} of group {self.comm.name!r} received no message with tag {self.tag} from "
                f"{self._source()} within {self.timeout:g} s",
                op=self.work.op,
                group=self.comm.name,
                ranks=[] if self.peer is None else [self.peer],
            )
        )

    def fail(self, error: BaseException) -> None:
        """End with `error`; the rest of a matched message goes nowhere."""
        self.comm.matching.withdraw(self)
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
            self.comm.matching.forget(arrival)
        else:
            arrival.ask(self.comm.id)


class Matching:
    """All point-to-point traffic of one membership."""

    def __init__(self, comm: Communicator) -> None:
        self._group = comm
        self.outgoing: dict[tuple[int, int], OutboundMessage] = {}
        self._active: dict[tuple[int, int], InboundMessage] = {}
        self._waiting: dict[int, deque[InboundMessage]] = {}
        self._posted: dict[int, dict[PostedReceive, None]] = {}
        self._listeners: dict[int, dict[asyncio.Future[None], None]] = {}
        self._sent = 0
        self._taken = False
        self._closed = False

    def next_id(self, tag: int) -> int:
        """Number the next message with `tag`; all messages share one count, so a tag used once costs nothing."""
        self._sent = self._sent + 1 & 0xFFFFFFFF
        return P2P | tag << 32 | self._sent

    def post(self, posted: PostedReceive) -> None:
        """Match `posted` with the oldest fitting message, or keep it."""
        for arrival in self._waiting.get(posted.tag, ()):
            if posted.peer is None or posted.peer == arrival.peer:
                self._take(arrival)
                posted.match(arrival)
                return
        self._posted.setdefault(posted.tag, {})[posted] = None

    def withdraw(self, posted: PostedReceive) -> None:
        """Take back a receive that is over."""
        if posted.arrival is not None:
            posted.arrival.discard = True
        else:
            _drop(self._posted, posted.tag, posted)

    def route(self, peer: int, header: Header) -> tuple[PostedReceive | None, memoryview | None]:
        """Name the caller's memory for a payload that is arriving."""
        arrival = self._active.get((peer, header[4]))
        if arrival is None or arrival.posted is None or arrival.posted.view is None or arrival.discard:
            return None, None
        return arrival.posted, arrival.posted.view[arrival.received : arrival.received + header[7]]

    def deliver(self, channel: Channel, peer: int, header: Header, payload: memoryview | None) -> bool:
        """Take a frame of a message; False if its bytes wait here."""
        kind, _, _, _, op, _, _, length, _ = header
        if kind == FrameKind.GRANT:
            if (outgoing := self.outgoing.get((peer, op))) is not None:
                outgoing.asked()
            return True
        arrival = self._active.get((peer, op))
        if arrival is None:
            arrival = self._active[peer, op] = InboundMessage(channel, peer, header)
            self._meet(arrival)
            if kind == FrameKind.READY:
                return self._is_heard(arrival, header)
        if arrival.received + length > arrival.total:
            raise ProtocolError(f"rank {peer} sent more than the {arrival.total} bytes of its message")
        if kind == FrameKind.READY:
            arrival.ready = True
            if arrival.posted is not None:
                arrival.ask(self._group.id)
            else:
                self._announce(arrival.tag)
            return self._is_heard(arrival, header)
        arrival.empty = False
        if arrival.posted is not None:
            self._feed(arrival, payload, length)
            return True
        arrival.hold(header)
        if length and payload is not None:
            arrival.parts.append(bytes(payload))
        arrival.received += length
        if arrival.complete:
            self._announce(arrival.tag)
        return False

    def _is_heard(self, arrival: InboundMessage, header: Header) -> bool:
        """Whether the news that a message waits has reached a receive; else it waits, too."""
        if arrival.posted is None:
            arrival.hold(header)
        return arrival.posted is not None

    async def next_message(self, tag: int) -> InboundMessage | None:
        """Wait for the oldest unmatched message with `tag` and take it, whole; None after the group was closed.

        A cancelled wait takes nothing.
        """
        endpoint = self._group.endpoint
        # Not before the first message of a turn: a wait that is always cancelled soon must get one some time.
        if self._taken and endpoint.turn_is_due():
            await asyncio.sleep(0)
        while True:
            self._group.raise_if_revoked()
            if self._closed:
                return None
            arrival = next(iter(self._waiting.get(tag, ())), None)
            if arrival is not None and arrival.complete:
                self._take(arrival)
                self.forget(arrival)
                if not self._taken:
                    self._taken = True
                    endpoint.runtime.call_soon(self._turned)
                return arrival
            if arrival is not None and arrival.withheld:
                arrival.ask(self._group.id)
            listener = endpoint.loop.create_future()
            self._listeners.setdefault(tag, {})[listener] = None
            try:
                await listener
            finally:
                _drop(self._listeners, tag, listener)

    def forget(self, arrival: InboundMessage) -> None:
        """The message has been received."""
        arrival.release()
        self._active.pop((arrival.peer, arrival.op), None)

    def put_back(self, arrival: InboundMessage, data: bytes, steps: Steps) -> None:
        """Let the next one take what `next_message` has given, and go on with `steps`, which have read some of it."""
        arrival.parts.append(data)
        arrival.steps = steps
        self._waiting.setdefault(arrival.tag, deque()).appendleft(arrival)
        self._announce(arrival.tag)

    def clear(self) -> None:
        """The group is over: drop what waits, wake who listens."""
        self._closed = True
        for arrival in self._active.values():
            arrival.data()
        self._active.clear()
        self._waiting.clear()
        for tag in list(self._listeners):
            self._announce(tag)

    def _turned(self) -> None:
        self._taken = False

    def _take(self, arrival: InboundMessage) -> None:
        waiting = self._waiting[arrival.tag]
        waiting.remove(arrival)
        if not waiting:
            del self._waiting[arrival.tag]

    def _meet(self, arrival: InboundMessage) -> None:
        for posted in self._posted.get(arrival.tag, ()):
            if posted.peer is None or posted.peer == arrival.peer:
                _drop(self._posted, arrival.tag, posted)
                posted.match(arrival)
                return
        self._waiting.setdefault(arrival.tag, deque()).append(arrival)
        self._announce(arrival.tag)

    def _feed(self, arrival: InboundMessage, payload: memoryview | None, length: int) -> None:
        posted = arrival.posted
        assert posted is not None
        if payload is not None and posted.view is not None and not arrival.discard:
            posted.view[arrival.received : arrival.received + length] = payload
        arrival.received += length
        if arrival.complete:
            if arrival.discard or posted.done:  # an empty message is complete as soon as it has matched
                self.forget(arrival)
            else:
                posted.complete()
        else:
            begun(posted)

    def _announce(self, tag: int) -> None:
        for listener in self._listeners.pop(tag, ()):
            if not listener.done():
                listener.set_result(None)


def _drop(table: dict[int, dict[K, None]], tag: int, entry: K) -> None:
    """Take an entry out, if it is there, and with its last entry a tag."""
    entries = table.get(tag)
    if entries is not None:
        entries.pop(entry, None)
        if not entries:
            table.pop(tag, None)
