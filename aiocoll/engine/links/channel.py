"""Channel: all data for one peer over one link, with a fair send queue and flow control.

Messages of different operations take turns segment by segment, so a long one never blocks another. Eager data, which
the receiver has not requested, has two limits: `EAGER_WINDOW` bytes per message and `LINK_WINDOW` bytes per peer. For
more, the sender announces the bytes in a READY frame. It sends them after the receiver has entered the operation and
replied with GRANT. The receiver enforces the windows: a peer that exceeds them breaks the protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from aiocoll.engine.control.messages import DATA, ControlMessage
from aiocoll.engine.control.sending import frame_of
from aiocoll.engine.job.context import Context
from aiocoll.engine.job.ids import StrangerError
from aiocoll.engine.links.flow_control import ALIGN, ASK_WINDOW, LEAST, LINK_WINDOW, WINDOW_LOT, Waiting
from aiocoll.engine.operations.base import Message, Operation
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.errors import ProtocolError
from aiocoll.runtime import BUDGET
from aiocoll.transport.base import Link, SharedMemoryLink
from aiocoll.transport.frame import EAGER, HEADER, SEGMENT, FrameKind, Header, describe
from aiocoll.transport.shared_memory import LEAST_BY_REFERENCE, MOST_BY_REFERENCE

if TYPE_CHECKING:
    from aiocoll.engine.channels import Channels
    from aiocoll.engine.communicator import Communicator

__all__ = ["Channel"]

# Plain ints, because a comparison with an enum member takes twice as long.
_DATA, _READY = int(FrameKind.DATA), int(FrameKind.READY)
_WINDOW, _CONTROL = int(FrameKind.WINDOW), int(FrameKind.CONTROL)
_pack = HEADER.pack


class Channel:
    """The send queue for `peer`, and the handler of frames that arrive on its data link.

    Args:
        context: the endpoint's context.
        peer: the rank at the other end, numbered as in the job.
        groups: the endpoint's groups, by id.
        owner: the channels of the endpoint.
    """

    __slots__ = (
        "_again",
        "_blocked",
        "_consumed",
        "_context",
        "_groups",
        "_held",
        "_inflight",
        "_owner",
        "_pumping",
        "_queue",
        "_unannounced",
        "_unasked",
        "_waiting",
        "carrier",
        "dialling",
        "link",
        "peer",
        "receiving",
        "shared",
    )

    def __init__(self, context: Context, peer: int, groups: Mapping[int, Communicator], owner: Channels) -> None:
        self.peer = peer
        self.link: Link | None = None
        #: The medium of the data, such as "shm" or "tcp". Kept after the link has closed; empty before the first link.
        self.carrier = ""
        #: The link, if it uses shared memory. Kept after the link has closed, because data that the peer left in the
        #: memory is still valid.
        self.shared: SharedMemoryLink | None = None
        self.dialling = False
        self.receiving: Operation | None = None
        self._context = context
        self._groups = groups
        self._owner = owner
        self._queue: deque[Message] = deque()
        self._inflight: tuple[Message, int] | None = None
        #: Frames (header and payload) that wait until the link is open.
        self._held: list[tuple[bytes, memoryview | None]] = []
        self._blocked: dict[Operation, list[Message]] = {}
        #: Blocked messages that are not announced to the peer yet, because its window has no room.
        self._unannounced: deque[Message] = deque()
        # Byte counts of eager data. `_unasked`: sent, but not yet reported by the peer as consumed. `_consumed`:
        # received and consumed, but not yet reported to the peer.
        self._unasked = 0
        self._consumed = 0
        self._waiting = Waiting(peer)
        self._pumping = self._again = False

    def attach(self, link: Link) -> None:
        """Send and receive on `link` from now on."""
        self.link = link
        self.carrier = link.carrier
        self.shared = link.shared
        self.dialling = False
        link.sink = self
        link.start()
        for frame in self._held:
            link.write(*frame)
        self._held.clear()
        self.pump()

    # -- sending

    def pass_on(self, operation: Operation, index: int, step: int, view: memoryview, total: int) -> bool | None:
        """Send a whole small message immediately if the queue is empty. This is the fast path of most messages.

        Returns:
            True if the message was sent; False if the link keeps a part of it and will call `sent`; None if the caller
            must queue it.
        """
        link = self.link
        counts = total if total > LEAST else LEAST
        if link is None or total > SEGMENT or self._queue or self._unasked + counts > LINK_WINDOW or not link.writable:
            return None
        header = _pack(_DATA, EAGER, step, operation.comm.id, operation.id, operation.fingerprint, 0, total, total)
        self._unasked += counts
        if link.write(header, view if total else None):
            return True
        message = Message(operation, index, step, view, total)
        message.moved = total
        self._inflight = message, total
        return False

    def enqueue(self, message: Message) -> None:
        """Queue `message` unless it is queued already, because more of its data may be sent now."""
        if not message.queued:
            message.queued = True
            self._queue.append(message)
        self.pump()

    def grant(self, operation: Operation) -> None:
        """Send the rest of `operation`'s messages, which the peer has permitted."""
        operation.granted |= {self.peer}
        for message in self._blocked.pop(operation, ()):
            message.blocked = False
            self.enqueue(message)

    def control(self, kind: FrameKind, group: int, op: int, amount: int = 0) -> None:
        """Send a frame without payload, ahead of the queued messages."""
        self._write(_pack(kind, 0, 0, group, op, 0, amount, 0, 0))

    def send_after_data(self, message: ControlMessage) -> bool:
        """Send a control message after all data; return False if there is no link, and no data waits for a link."""
        if self.link is None and not self._held:
            return False
        self.send_control(message)
        return True

    def send_control(self, message: ControlMessage) -> None:
        """Send a control message after all data. Open a link if there is none."""
        self._write(*frame_of(message))

    def _write(self, header: bytes, payload: memoryview | None = None) -> None:
        """Send a frame ahead of the queued messages."""
        if self.link is not None:
            self.link.write(header, payload)
        else:
            self._held.append((header, payload))
            self._owner.dial(self)

    def open(self) -> None:
        """Open the link, if there is none."""
        if self.link is None and self.peer not in self._owner.gone:
            self._owner.dial(self)

    def pump(self) -> None:
        """Send queued messages as far as the link allows, one segment of each message in turn."""
        link = self.link
        if link is None:
            if self._queue:
                self._owner.dial(self)
            return
        if self._pumping:
            return
        self._pumping = True
        ticks = self._context.runtime.ticks
        deadline = ticks() + BUDGET
        while self._queue and link.writable:
            message = self._queue.popleft()
            message.queued = False
            if not message.operation.done:
                try:
                    self._send_segment(link, message)
                except Exception as error:
                    message.operation.comm.revoke_after_crash(error)
            if self._queue and ticks() > deadline:
                self._schedule_pump()
                break
        self._pumping = False

    def drained(self, link: Link) -> None:
        """Send more queued messages, because the link has sent the frame that it had stored."""
        if self._inflight is not None:
            message, nbytes = self._inflight
            self._inflight = None
            self._sent(message, nbytes)
        self.pump()

    def _send_segment(self, link: Link, message: Message) -> None:
        operation = message.operation
        moved = message.moved
        nbytes = message.limit - moved
        place = self._find_reference(message) if nbytes >= LEAST_BY_REFERENCE else None
        nbytes = min(nbytes, SEGMENT if place is None else MOST_BY_REFERENCE)
        if not nbytes and (message.total or moved):
            if message.announces and self.peer not in operation.granted:
                self._block(link, message)
            return
        flags, cut = 0, False
        if self.peer not in operation.granted:
            flags = EAGER
            room = LINK_WINDOW - self._unasked
            # If the peer reads the payload in place, send it in one frame. The peer cannot use an eager part yet, so it
            # would have to copy this part.
            allowed = 0 if place is not None and message.total > EAGER_WINDOW else min(EAGER_WINDOW - moved, room)
            if allowed < nbytes or room < LEAST:
                cut = True
                nbytes = max(0, allowed) // ALIGN * ALIGN
                if not nbytes or room < LEAST:
                    self._block(link, message)
                    return
            self._unasked += max(nbytes, LEAST)
        referenced = place is not None and self._send_by_reference(message, place, flags, nbytes)
        if not referenced:
            nbytes = min(nbytes, SEGMENT)
        message.moved = moved + nbytes
        written = False if referenced else link.write(*self._frame(message, flags, moved, nbytes))
        if cut:
            # Announce the message now, so that later messages do not use up the window room for the announcement.
            self._block(link, message)
        elif message.moved < message.limit:
            message.queued = True
            self._queue.append(message)
        if referenced:
            return
        if written:
            operation.sent(message, nbytes)
        else:
            self._inflight = message, nbytes

    def _frame(self, message: Message, flags: int, moved: int, nbytes: int) -> tuple[bytes, memoryview | None]:
        operation = message.operation
        group, op, fingerprint = operation.comm.id, operation.id, operation.fingerprint
        offset, total = moved & 0xFFFFFFFF, message.total & 0xFFFFFFFF
        header = _pack(_DATA, flags, message.step, group, op, fingerprint, offset, nbytes, total)
        return header, message.view[moved : moved + nbytes] if nbytes else None

    def _find_reference(self, message: Message) -> tuple[int, int] | None:
        """Return the memory in which the peer can read the next bytes in place; None if that would be slower."""
        if self.shared is None or self.shared is not self.link:
            return None
        operation = message.operation
        attach = message.total >= operation.single_copy_from
        if operation.reduces and not attach:
            return None  # the peer reduces data from the ring as fast as it could copy from this memory
        return self.shared.references.find(message.view[message.moved :], attach=attach)

    def _send_by_reference(self, message: Message, place: tuple[int, int], flags: int, nbytes: int) -> bool:
        """Send a frame whose payload the peer reads in place. Return False if the link has no space for the frame."""
        assert self.shared is not None
        header, _ = self._frame(message, flags, message.moved, nbytes)
        return self.shared.references.write(header, place, message.operation, partial(self._sent, message, nbytes))

    def _sent(self, message: Message, nbytes: int) -> None:
        """Report to the operation that `nbytes` bytes have been sent, so that their memory may be overwritten."""
        try:
            message.operation.sent(message, nbytes)
        except Exception as error:
            message.operation.comm.revoke_after_crash(error)

    def _block(self, link: Link, message: Message) -> None:
        if message.blocked:
            return
        message.blocked = True
        operation = message.operation
        self._blocked.setdefault(operation, []).append(message)
        # If a message is longer than the eager window, and the receiver already has a part of it, the receiver grants
        # the rest when it enters the operation. Then no announcement is needed.
        if message.total <= EAGER_WINDOW or not message.moved:
            self._unannounced.append(message)
            self._announce(link)

    def _announce(self, link: Link) -> None:
        """Notify the peer of messages that wait for permission, as long as its window has room for notices."""
        while self._unannounced and self._unasked + LEAST <= LINK_WINDOW + ASK_WINDOW:
            message = self._unannounced.popleft()
            operation = message.operation
            if message.blocked and not operation.done:
                self._unasked += LEAST
                group, op, fingerprint = operation.comm.id, operation.id, operation.fingerprint
                total = message.total & 0xFFFFFFFF
                link.write(_pack(_READY, EAGER, message.step, group, op, fingerprint, message.batch, 0, total))

    def _schedule_pump(self) -> None:
        if not self._again:
            self._again = True
            self._context.runtime.call_soon(self._resume)

    def _resume(self) -> None:
        self._again = False
        self.pump()

    # -- receiving: the channel handles the frames of its link

    def route(self, link: Link, header: Header) -> memoryview | None:
        """Return the memory for an arriving payload."""
        if header[0] != _DATA:
            return None
        try:
            group = self._groups.get(header[3])
            if group is None:
                return None
            operation, place = group.route(self.peer, header)
        except StrangerError:
            return None
        except Exception as error:
            raise self._handling_error(header, error) from error
        if place is not None and place.nbytes != header[7]:
            raise ProtocolError(f"rank {self.peer} sent more than the {header[8]} bytes of its message")
        self.receiving = operation
        return place

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        """Deliver a complete frame to its group."""
        self.receiving = None
        try:
            if header[0] != _DATA and self._handle_channel_frame(header, payload):
                return
            group = self._groups.get(header[3])
            deliver = self._owner.keep_frame if group is None else group.deliver
            try:
                taken = deliver(self, header, payload)
            except StrangerError:
                taken = self._owner.keep_frame(self, header, payload)
            if taken and header[1] & EAGER:
                length = header[7]
                self.consume(length if length > LEAST else LEAST)
        except ProtocolError:
            raise
        except Exception as error:
            raise self._handling_error(header, error) from error

    def withdrawn(self, link: Link, header: Header) -> None:
        """Handle a frame that the sender has withdrawn after a failure: its eager bytes no longer count."""
        self.receiving = None
        if header[1] & EAGER:
            self.consume(max(header[7], LEAST))

    def _handle_channel_frame(self, header: Header, payload: memoryview | None) -> bool:
        """Handle a control message or a window update; return False if the frame belongs to an operation."""
        kind = header[0]
        if kind == _CONTROL:
            self._owner.receive(self.peer, payload, DATA)
            return True
        if header[7]:
            raise ProtocolError(f"rank {self.peer} sent {header[7]} bytes with a {FrameKind(kind).name} frame")
        if kind == _WINDOW:
            self._on_consumed(header[6])
        return kind == _WINDOW

    def _handling_error(self, header: Header, error: Exception) -> ProtocolError:
        what = f"rank {self._context.rank} could not handle a frame of rank {self.peer}"
        return ProtocolError(f"{what}, a {describe(header)}: {error!r}")

    def _on_consumed(self, nbytes: int) -> None:
        """Handle the peer's report of eager bytes that it has consumed."""
        if nbytes > self._unasked:
            raise ProtocolError(
                f"rank {self.peer} reported {nbytes} consumed bytes, but only {self._unasked} were unconsumed"
            )
        self._unasked -= nbytes
        if self._unannounced and self.link is not None:
            self._announce(self.link)
        self.pump()

    def hold(self, header: Header) -> None:
        """Count a buffered frame; raise `ProtocolError` if the buffered frames exceed the peer's window."""
        self._waiting.add(header, self._consumed)

    def redeliver(
        self, take: Callable[[Channel, Header, memoryview | None], bool], header: Header, payload: bytes
    ) -> None:
        """Pass a buffered frame to `take`, which may buffer the frame again."""
        nbytes = self._waiting.remove(header)
        if self._waiting.redeliver(take, self, header, memoryview(payload)):
            self.consume(nbytes)

    def release(self, header: Header) -> None:
        """Stop counting a frame that is no longer buffered."""
        self.consume(self._waiting.remove(header))

    def consume(self, nbytes: int) -> None:
        """Count eager bytes that were consumed, and report them to the sender in batches of `WINDOW_LOT`."""
        self._consumed += nbytes
        if self._consumed >= WINDOW_LOT and self.link is not None:
            self.control(FrameKind.WINDOW, 0, 0, self._consumed)
            self._consumed = 0

    def lost(self, link: Link, error: Exception | None) -> None:
        """Handle a link that has closed, or that has carried an unacceptable message."""
        self.cut()
        self._owner.lost(self.peer, error, link)

    def cut(self) -> list[Link]:
        """Stop using the link; return a list with the link, or an empty list if there is no link."""
        link, self.link = self.link, None
        if self.shared is not None and self.shared.native is not None:
            self.shared.native.retire()
        self.receiving = self._inflight = None
        return [] if link is None else [link]

    def release_shared(self) -> None:
        """Release the memory shared with the peer, after the link has closed."""
        if self.shared is not None:
            self.shared.forget()
            self.shared = None

    def purge(self, group: int, has_left: bool) -> None:
        """Free the peer's shared-memory posts for a closed group; also its later posts, unless the peer has left."""
        if self.shared is not None:
            self.shared.purge(group, has_left)

    def drop(self, operation: Operation) -> None:
        """Forget the blocked messages and the receive memory of a failed operation."""
        self._blocked.pop(operation, None)
        if self.shared is not None:
            self.shared.references.invalidate(operation)
        if self.receiving is operation:
            self.receiving = None
            if self.link is not None:
                self.link.divert()
