"""Base class of all operations in flight, and `Message`, the unit of sending."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final

from aiocoll.completion import Completion
from aiocoll.engine.operations.signature import Signature, description
from aiocoll.transport.frame import FrameKind

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.links.channel import Channel

__all__ = ["NO_PEERS", "Announced", "Message", "Operation", "carriers_of"]

NO_PEERS: Final[frozenset[int]] = frozenset()


class Message:
    """Data that an operation sends to one peer in one step of its schedule.

    Attributes:
        operation: the owner. Its `sent(message, nbytes)` is called when bytes have been sent.
        index: the action of the owner that sends the message.
        view: the payload, `total` bytes.
        limit: number of bytes that may be sent so far.
        moved: number of bytes that the link has accepted.
        queued: True while the message is in the channel's queue.
        blocked: True while the message waits for a grant.
        announces: True if the message is announced to the receiver before any byte may be sent.
        batch: number of the batch that the announcement belongs to.
    """

    announces = False
    batch = 0

    __slots__ = ("blocked", "index", "limit", "moved", "operation", "queued", "step", "total", "view")

    def __init__(self, operation: Operation, index: int, step: int, view: memoryview, limit: int) -> None:
        self.operation = operation
        self.index = index
        self.step = step
        self.view = view
        self.total = view.nbytes
        self.limit = limit
        self.moved = 0
        self.queued = False
        self.blocked = False


class Announced(Message):
    """A message that is announced to the peer before it has data, so that later messages cannot overtake it."""

    __slots__ = ("batch",)

    announces = True

    def __init__(self, operation: Operation, step: int, view: memoryview, batch: int) -> None:
        super().__init__(operation, 0, step, view, 0)
        self.batch = batch


class Operation:
    """Base class of all operations that a group has in flight.

    Args:
        comm: the communicator of this rank in the group.
        identity: the operation's 64-bit id on the wire; see `aiocoll.transport.frame`.
        signature: the properties that all ranks must agree on.
        fingerprint: hash of the signature.
        completion: the completion that ends with the operation. It has the call's timeout.

    Attributes:
        comm, id, signature, fingerprint, completion: the arguments.
        parent: the parent operation; None if a call started this operation directly.
        entered: time of entry on the runtime's clock.
        started: time when the first part of a message had moved, or the last child started; NaN before, or without
            parts.
        waited_for: the peer whose data is being processed. If the operation ends now, it has waited for that peer. -1
            for none.
        peer: for a message, the other rank; None for a receive from any rank.
        timeout: seconds until `expire`; initially the completion's timeout.
        reported: time of the next stall report; 0 before the first.
        granted: peers that have entered the operation and accept any amount of data.
        promised: peers that have received a grant from this rank.
    """

    __slots__ = (
        "_put_off",
        "comm",
        "completion",
        "done",
        "entered",
        "fingerprint",
        "granted",
        "id",
        "parent",
        "peer",
        "promised",
        "reported",
        "signature",
        "started",
        "timeout",
        "waited_for",
        "warned",
    )

    def __init__(
        self,
        comm: Communicator,
        identity: int,
        signature: Signature,
        fingerprint: int,
        completion: Completion,
    ) -> None:
        self.comm = comm
        self.id = identity
        self.signature = signature
        self.fingerprint = fingerprint
        self.completion = completion
        self.parent: Operation | None = None
        self.peer: int | None = None
        self.timeout = completion.timeout
        self.entered = 0.0
        self.started = nan
        self.waited_for = -1
        self.done = False
        self.warned = False
        self.reported = 0.0
        self.granted = NO_PEERS
        self.promised = NO_PEERS
        self._put_off = False

    @property
    def root(self) -> Operation:
        """The operation that the user's call has started: this operation or its outermost parent."""
        operation = self
        while operation.parent is not None:
            operation = operation.parent
        return operation

    @property
    def reduces(self) -> bool:
        """Return whether the operation reduces the arrays that it receives; otherwise it only copies them."""
        return False

    @property
    def single_copy_from(self) -> float:
        """The minimum size in bytes from which the peer reads a message directly in this process's memory."""
        sizes = self.comm.tuning.single_copy
        return sizes.reduced if self.reduces else sizes.moved

    def set_peer(self, peer: int | None) -> None:
        """Set the peer of a send or receive: the rank at the other end."""
        self.peer = peer

    def set_waited_for(self, peer: int) -> None:
        """Set `waited_for` to the rank whose data is being processed or has completed the operation; -1 for none."""
        self.waited_for = peer

    def enter(self) -> None:
        """Start the operation: send data that is ready, and process data that arrived before."""
        raise NotImplementedError

    def advance(self) -> None:
        """Continue local work that was deferred to keep the callbacks short."""

    def suppress_reports(self) -> None:
        """Suppress stall reports and warnings: another operation reports them, or no rank caused the delay."""
        self.warned, self.reported = True, inf

    def schedule_advance(self) -> None:
        """Schedule another call of `advance` for the next loop iteration."""
        if not self._put_off:
            self._put_off = True
            self.comm.call_soon(self._resume)

    def _resume(self) -> None:
        self._put_off = False
        if not self.done:
            self.advance()

    def route(self, peer: int, step: int, offset: int, total: int, length: int) -> memoryview | None:
        """Return memory for `length` arriving bytes of a message, or None to receive them in a temporary buffer."""
        return None

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Process a segment of a message; return False if this rank does not expect the message.

        `payload` is None if the segment is already in the memory that `route` returned.
        """
        return False

    def sent(self, message: Message, nbytes: int) -> None:
        """Record that `nbytes` more bytes of `message` have been sent: their memory may be overwritten from now on."""

    def promise(self, peer: int) -> None:
        """Send `peer` one grant, because this rank has entered the operation and accepts all its data."""
        if peer not in self.promised:
            self.promised |= {peer}
            self.comm.channels[peer].control(FrameKind.GRANT, self.comm.id, self.id)

    def needs(self, peer: int) -> bool:
        """Return whether the operation still needs `peer`, which is leaving the group."""
        raise NotImplementedError

    def awaited_ranks(self) -> list[int]:
        """Return the ranks whose data for this operation has not arrived."""
        return []

    def seek(self) -> None:
        """Open links to the ranks that the operation waits for, because these ranks may be unable to open the links."""
        for peer in self.awaited_ranks() if self.peer is None else [self.peer]:
            if peer != self.comm.rank:
                self.comm.channels[peer].open()

    def describe(self) -> dict[str, Any]:
        """Return this rank's call as plain data, for error messages."""
        return description(
            self.comm.rank, self.signature, self.completion.shape, self.completion.key, self.completion.seq
        )

    def title(self) -> str:
        """Return the op name, with the key or sequence number if there is one."""
        name = self.completion.key or self.completion.seq
        return self.completion.op if name is None else f"{self.completion.op} (sequence {name!r})"

    def describe_wait(self) -> str | None:
        """Return a text that describes why a send or receive is not complete; None for a collective.

        None for a collective, whose state the stall inspector collects from all ranks.
        """
        return None if self.peer is None else f"rank {self.peer} has not received the whole message"

    def algorithm(self) -> str | None:
        """Return the name of the algorithm; None if the operation has only one, or if it is not chosen yet."""
        return None

    def carriers(self) -> str:
        """Return the media that carry the data: "shm", "tcp", or several joined by "+"; "" before any link is open."""
        channels = self.comm.channels
        return carriers_of(channels if self.peer is None else [channels[self.peer]])

    def is_waiting_for_device(self) -> bool:
        """Return whether the operation waits only for a device of this rank."""
        return False

    def expire(self) -> None:
        """Fail the operation, because its timeout has expired."""
        self.comm.stalls.timed_out(self)

    def succeed(self, result: Any) -> None:
        """Finish the operation with a result."""
        self.done = True
        self.comm.ended(self, None)
        self.completion.finish(result)

    def fail(self, error: BaseException) -> None:
        """Finish the operation with `error`. Afterwards the operation does not use the caller's memory."""
        if not self.done:
            self.done = True
            self.comm.ended(self, error)
            self.comm.divert(self)
            self.completion.finish(None, error)


def carriers_of(channels: Iterable[Channel]) -> str:
    """Return the media that carry the data of these channels: "shm", "tcp", or several joined by "+".

    A channel without a link counts with the transport of its last link.
    """
    return "+".join(sorted({channel.carrier for channel in channels if channel.carrier}))
