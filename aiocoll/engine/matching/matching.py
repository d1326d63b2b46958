"""Point-to-point messages: matched by source and tag, in the order in which they were sent.

A message without a receive waits here, at most an eager window of it; the rest stays with its sender until a
receive matches. For receives see `aiocoll.engine.matching.posted`, for sends `aiocoll.engine.matching.outbound`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from aiocoll.engine.control.causes import failure_by
from aiocoll.engine.matching.inbound import InboundMessage, Receive
from aiocoll.engine.matching.outbound import OutboundMessage, begun, is_sparse
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.engine.matching.probe import PostedProbe
from aiocoll.engine.matching.to_self import Loopback
from aiocoll.engine.operations.incremental import Steps
from aiocoll.engine.operations.signature import P2P
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import FrameKind, Header

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.links.channel import Channel

__all__ = ["Matching"]

K = TypeVar("K")


class Matching:
    """The messages of one group.

    Args:
        group: the group.

    Attributes:
        group: as given.
        outgoing: sends that have not ended, by peer and id.
        loopback: the way of messages to this rank itself.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self.outgoing: dict[tuple[int, int], OutboundMessage] = {}
        self.loopback = Loopback(self, group.rank)
        self._active: dict[tuple[int, int], InboundMessage] = {}
        self._waiting: dict[int, deque[InboundMessage]] = {}
        self._posted: dict[int, dict[PostedReceive, None]] = {}
        self._probes: dict[int, dict[PostedProbe, None]] = {}
        self._listeners: dict[int, dict[asyncio.Future[None], None]] = {}
        self._sent = 0
        self._taken = False
        self._closed = False

    def next_id(self, tag: int) -> int:
        """Number the next message with `tag`; all messages share one counter, so a tag used once costs nothing."""
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
        """Remove a receive that is over."""
        if posted.arrival is not None:
            posted.arrival.discard = True
        else:
            _drop(self._posted, posted.tag, posted)

    def find(self, peer: int | None, tag: int) -> InboundMessage | None:
        """Return the oldest message of that rank, or of any, with `tag` that no receive has matched."""
        for arrival in self._waiting.get(tag, ()):
            if peer is None or peer == arrival.peer:
                return arrival
        return None

    def watch(self, probe: PostedProbe) -> None:
        """Tell `probe` the oldest message that fits it, now or when there is one."""
        arrival = self.find(probe.peer, probe.tag)
        if arrival is not None:
            probe.found(arrival)
        else:
            self._probes.setdefault(probe.tag, {})[probe] = None

    def unwatch(self, probe: PostedProbe) -> None:
        """Forget a probe that is over."""
        _drop(self._probes, probe.tag, probe)

    def route(self, peer: int, header: Header) -> tuple[Receive | None, memoryview | None]:
        """Return the receive and the destination memory of a payload that is arriving."""
        arrival = self._active.get((peer, header[4]))
        if arrival is None or arrival.posted is None or arrival.posted.view is None or arrival.discard:
            return None, None
        return arrival.posted, arrival.posted.view[arrival.received : arrival.received + header[7]]

    def deliver(self, channel: Channel | Loopback, peer: int, header: Header, payload: memoryview | None) -> bool:
        """Deliver a frame of a message; False if its bytes wait here."""
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
                return self._is_delivered(arrival, header)
        if arrival.received + length > arrival.total:
            raise ProtocolError(f"rank {peer} sent more than the {arrival.total} bytes of its message")
        if kind == FrameKind.READY:
            arrival.ready = True
            if arrival.posted is not None:
                arrival.ask(self.group.id)
            else:
                self._announce(arrival.tag)
            return self._is_delivered(arrival, header)
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

    def _is_delivered(self, arrival: InboundMessage, header: Header) -> bool:
        """Whether the announcement of a message has reached a receive; otherwise it waits, too."""
        if arrival.posted is None:
            arrival.hold(header)
        return arrival.posted is not None

    async def next_message(self, tag: int) -> InboundMessage | None:
        """Wait for the oldest unmatched message with `tag` and take it, complete; None after the group was closed.

        A cancelled wait takes nothing.

        Raises:
            GroupRevokedError: the group had failed before this call.
            GroupError: the group fails while this call waits: the cause with its class, as for pending works.
            TypeError: it is a sparse array, which stays.
        """
        self.group.raise_if_revoked()
        runtime = self.group.runtime
        # Yield before the first message of a turn: a wait that is always cancelled quickly must succeed eventually.
        if self._taken and self.group.polling.turn_is_due():
            await asyncio.sleep(0)
        while True:
            if self.group.cause is not None:
                raise failure_by(self.group.cause)
            if self._closed:
                return None
            arrival = next(iter(self._waiting.get(tag, ())), None)
            if arrival is not None and is_sparse(arrival.code):
                raise TypeError(
                    f"the next message with tag {tag}, of rank {arrival.peer}, is a sparse array, which only a receive "
                    f"can take: await pg.recv(array, {arrival.peer}, {tag}), with a sparse array of its dtype and shape"
                )
            if arrival is not None and arrival.complete:
                self._take(arrival)
                self.forget(arrival)
                if not self._taken:
                    self._taken = True
                    runtime.call_soon(self._turned)
                return arrival
            if arrival is not None and arrival.withheld:
                arrival.ask(self.group.id)
            listener = runtime.loop.create_future()
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
        """Return a message that `next_message` gave; the next caller continues its decoding with `steps`."""
        arrival.parts.append(data)
        arrival.steps = steps
        self._waiting.setdefault(arrival.tag, deque()).appendleft(arrival)
        self._show(arrival)

    def clear(self) -> None:
        """The group is over: drop waiting messages, wake waiting tasks."""
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
        self._show(arrival)

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

    def _show(self, arrival: InboundMessage) -> None:
        """Tell those who wait for such a message that it is here."""
        if self._probes:
            for probe in list(self._probes.get(arrival.tag, ())):
                if probe.peer is None or probe.peer == arrival.peer:
                    self.unwatch(probe)
                    probe.found(arrival)
        self._announce(arrival.tag)

    def _announce(self, tag: int) -> None:
        for listener in self._listeners.pop(tag, ()):
            if not listener.done():
                listener.set_result(None)


def _drop(table: dict[int, dict[K, None]], tag: int, entry: K) -> None:
    """Remove an entry, if it exists; after a tag's last entry also the tag."""
    entries = table.get(tag)
    if entries is not None:
        entries.pop(entry, None)
        if not entries:
            table.pop(tag, None)
