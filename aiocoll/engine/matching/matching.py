"""Matching of point-to-point messages with receives, by source and tag, in the order in which they were sent.

A message without a receive waits here, with at most an eager window of its bytes. The rest stays with its sender until
a receive matches. For receives see `aiocoll.engine.matching.posted`, for sends `aiocoll.engine.matching.outbound`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from aiocoll.engine.control.causes import failure_by
from aiocoll.engine.matching.inbound import InboundMessage, Receive
from aiocoll.engine.matching.outbound import OutboundMessage, is_sparse, mark_begun
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
    """The point-to-point messages of one group on one rank.

    Args:
        group: the communicator of the group.

    Attributes:
        group: the communicator.
        outgoing: sends that have not ended, by peer and id.
        loopback: the path of messages from this rank to itself.
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
        self._has_taken = False
        self._closed = False

    def next_id(self, tag: int) -> int:
        """Return the id for the next message that this rank sends with `tag`.

        All messages share one counter, so a new tag needs no memory.
        """
        self._sent = self._sent + 1 & 0xFFFFFFFF
        return P2P | tag << 32 | self._sent

    def post(self, posted: PostedReceive) -> None:
        """Match the receive `posted` with the oldest message of the same source and tag, or queue the receive."""
        for arrival in self._waiting.get(posted.tag, ()):
            if posted.peer is None or posted.peer == arrival.peer:
                self._dequeue(arrival)
                posted.match(arrival)
                return
        self._posted.setdefault(posted.tag, {})[posted] = None

    def withdraw(self, posted: PostedReceive) -> None:
        """Remove a queued receive that has ended."""
        if posted.arrival is not None:
            posted.arrival.discard = True
        else:
            _remove_entry(self._posted, posted.tag, posted)

    def find(self, peer: int | None, tag: int) -> InboundMessage | None:
        """Return the oldest unmatched message with `tag` from `peer`, or from any rank if `peer` is None."""
        for arrival in self._waiting.get(tag, ()):
            if peer is None or peer == arrival.peer:
                return arrival
        return None

    def watch(self, probe: PostedProbe) -> None:
        """Report to `probe` the oldest message of the same source and tag, now or when such a message arrives."""
        arrival = self.find(probe.peer, probe.tag)
        if arrival is not None:
            probe.on_found(arrival)
        else:
            self._probes.setdefault(probe.tag, {})[probe] = None

    def unwatch(self, probe: PostedProbe) -> None:
        """Remove a waiting probe that has ended."""
        _remove_entry(self._probes, probe.tag, probe)

    def route(self, peer: int, header: Header) -> tuple[Receive | None, memoryview | None]:
        """Return the receive for an arriving payload, and the memory for the payload."""
        arrival = self._active.get((peer, header[4]))
        if arrival is None or arrival.posted is None or arrival.posted.view is None or arrival.discard:
            return None, None
        return arrival.posted, arrival.posted.view[arrival.received : arrival.received + header[7]]

    def deliver(self, channel: Channel | Loopback, peer: int, header: Header, payload: memoryview | None) -> bool:
        """Deliver a frame of a message; return False if its bytes are buffered until a receive matches."""
        kind, _, _, _, op, _, _, length, _ = header
        if kind == FrameKind.GRANT:
            if (outgoing := self.outgoing.get((peer, op))) is not None:
                outgoing.on_grant()
            return True
        arrival = self._active.get((peer, op))
        if arrival is None:
            arrival = self._active[peer, op] = InboundMessage(channel, peer, header)
            self._match_arrival(arrival)
            if kind == FrameKind.READY:
                return self._is_delivered(arrival, header)
        if arrival.received + length > arrival.total:
            raise ProtocolError(f"rank {peer} sent more than the {arrival.total} bytes of its message")
        if kind == FrameKind.READY:
            arrival.ready = True
            if arrival.posted is not None:
                arrival.grant(self.group.id)
            else:
                self._wake_listeners(arrival.tag)
            return self._is_delivered(arrival, header)
        arrival.empty = False
        if arrival.posted is not None:
            self._receive_data(arrival, payload, length)
            return True
        arrival.hold(header)
        if length and payload is not None:
            arrival.parts.append(bytes(payload))
        arrival.received += length
        if arrival.complete:
            self._wake_listeners(arrival.tag)
        return False

    def _is_delivered(self, arrival: InboundMessage, header: Header) -> bool:
        """Return whether an announced message has a matching receive. If it has none, buffer the announcement."""
        if arrival.posted is None:
            arrival.hold(header)
        return arrival.posted is not None

    async def next_message(self, tag: int) -> InboundMessage | None:
        """Wait for the oldest unmatched message with `tag`, and remove it when it is complete.

        Return None after the group was closed. A cancelled wait removes no message.

        Raises:
            GroupRevokedError: the group had failed before this call.
            GroupError: the group fails during this call. The cause keeps its class, as for pending works.
            TypeError: the message is a sparse array. It stays in the queue.
        """
        self.group.raise_if_revoked()
        runtime = self.group.runtime
        # Do not yield before the first message of a loop iteration: a task whose waits are often cancelled early would
        # otherwise get no message.
        if self._has_taken and self.group.polling.turn_is_due():
            await asyncio.sleep(0)
        while True:
            if self.group.cause is not None:
                raise failure_by(self.group.cause)
            if self._closed:
                return None
            arrival = next(iter(self._waiting.get(tag, ())), None)
            if arrival is not None and is_sparse(arrival.code):
                raise TypeError(
                    f"the next message with tag {tag}, from rank {arrival.peer}, is a sparse array, not an object; "
                    f"receive it with await pg.recv(array, {arrival.peer}, {tag}) and a sparse array of "
                    "its dtype and shape"
                )
            if arrival is not None and arrival.complete:
                self._dequeue(arrival)
                self.forget(arrival)
                if not self._has_taken:
                    self._has_taken = True
                    runtime.call_soon(self._end_turn)
                return arrival
            if arrival is not None and arrival.is_grant_pending:
                arrival.grant(self.group.id)
            listener = runtime.loop.create_future()
            self._listeners.setdefault(tag, {})[listener] = None
            try:
                await listener
            finally:
                _remove_entry(self._listeners, tag, listener)

    def forget(self, arrival: InboundMessage) -> None:
        """Remove a message that has been received."""
        arrival.release()
        self._active.pop((arrival.peer, arrival.op), None)

    def put_back(self, arrival: InboundMessage, data: bytes, steps: Steps) -> None:
        """Put a message from `next_message` back into the queue. The next caller continues decoding with `steps`."""
        arrival.parts.append(data)
        arrival.steps = steps
        self._waiting.setdefault(arrival.tag, deque()).appendleft(arrival)
        self._notify_waiters(arrival)

    def clear(self) -> None:
        """Drop unmatched messages and wake waiting tasks, because the group has ended."""
        self._closed = True
        for arrival in self._active.values():
            arrival.data()
        self._active.clear()
        self._waiting.clear()
        for tag in list(self._listeners):
            self._wake_listeners(tag)

    def _end_turn(self) -> None:
        self._has_taken = False

    def _dequeue(self, arrival: InboundMessage) -> None:
        waiting = self._waiting[arrival.tag]
        waiting.remove(arrival)
        if not waiting:
            del self._waiting[arrival.tag]

    def _match_arrival(self, arrival: InboundMessage) -> None:
        for posted in self._posted.get(arrival.tag, ()):
            if posted.peer is None or posted.peer == arrival.peer:
                _remove_entry(self._posted, arrival.tag, posted)
                posted.match(arrival)
                return
        self._waiting.setdefault(arrival.tag, deque()).append(arrival)
        self._notify_waiters(arrival)

    def _receive_data(self, arrival: InboundMessage, payload: memoryview | None, length: int) -> None:
        posted = arrival.posted
        assert posted is not None
        if payload is not None and posted.view is not None and not arrival.discard:
            posted.view[arrival.received : arrival.received + length] = payload
        arrival.received += length
        if arrival.complete:
            if arrival.discard or posted.done:  # an empty message is complete as soon as a receive has matched
                self.forget(arrival)
            else:
                posted.complete()
        else:
            mark_begun(posted)

    def _notify_waiters(self, arrival: InboundMessage) -> None:
        """Notify probes and waiting tasks that a message has arrived."""
        if self._probes:
            for probe in list(self._probes.get(arrival.tag, ())):
                if probe.peer is None or probe.peer == arrival.peer:
                    self.unwatch(probe)
                    probe.on_found(arrival)
        self._wake_listeners(arrival.tag)

    def _wake_listeners(self, tag: int) -> None:
        for listener in self._listeners.pop(tag, ()):
            if not listener.done():
                listener.set_result(None)


def _remove_entry(table: dict[int, dict[K, None]], tag: int, entry: K) -> None:
    """Remove an entry from the list of a tag, if it is there, and remove the tag when its list is empty."""
    entries = table.get(tag)
    if entries is not None:
        entries.pop(entry, None)
        if not entries:
            table.pop(tag, None)
