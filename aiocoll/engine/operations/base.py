"""The base of all operations in flight: `enter`, `advance`, `fail`; and the message, the unit of sending."""

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

__all__ = ["NOBODY", "Announced", "Message", "Operation", "carriers_of"]

NOBODY: Final[frozenset[int]] = frozenset()


class Message:
    """What an operation sends to one peer in one step.

    Attributes:
        operation: its owner, whose `sent(message, nbytes)` is called when bytes have been sent.
        index: the owner's action that it belongs to.
        view: the bytes, `total` of them.
        limit: how many bytes may be sent so far.
        moved: how many bytes the link has accepted.
        queued: it is in the channel's queue.
        blocked: it waits for a grant.
        announces: if nothing of it may be sent yet, it is announced to the receiver.
        batch: with the announcement, the batch it is part of.
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
    """A message announced to its receiver before there is anything to send, so that no later one overtakes it."""

    __slots__ = ("batch",)

    announces = True

    def __init__(self, operation: Operation, step: int, view: memoryview, batch: int) -> None:
        super().__init__(operation, 0, step, view, 0)
        self.batch = batch


class Operation:
    """Base of everything that a group has in flight.

    Args:
        comm: this rank's part in the group.
        identity: its 64-bit id on the wire; see `aiocoll.transport.frame`.
        signature: what the ranks must agree on.
        fingerprint: hash of the signature.
        completion: ends with the operation; it has the call's timeout.

    Attributes:
        comm, id, signature, fingerprint, completion: as given.
        parent: the operation that it is a child of; None if a call has started it.
        entered: when it was entered, on the runtime's clock.
        started: when the first part of a message had moved, or the last child was started; NaN if it has no parts.
        waited_for: while it takes what a peer has sent or read, that peer: if it ends now, it has waited for it. -1 for
            none.
        peer: for a message, the other rank; None for a receive from any rank.
        timeout: seconds until `expire`; initially the completion's.
        reported: when its next stall report is due; 0 before the first.
        granted: peers that have entered it and accept any amount.
        promised: peers that this rank has granted.
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
        self.granted = NOBODY
        self.promised = NOBODY
        self._put_off = False

    @property
    def root(self) -> Operation:
        """The operation that a call has started: itself, or the one that it is a part of."""
        operation = self
        while operation.parent is not None:
            operation = operation.parent
        return operation

    @property
    def reduces(self) -> bool:
        """Whether its messages are reduced into something, not only moved."""
        return False

    @property
    def single_copy_from(self) -> float:
        """Bytes of a message from which it pays to have the peer read it in the memory of this process."""
        sizes = self.comm.tuning.single_copy
        return sizes.reduced if self.reduces else sizes.moved

    def be_with(self, peer: int | None) -> None:
        """Set the other rank of a message."""
        self.peer = peer

    def set_waited_for(self, peer: int) -> None:
        """Set `waited_for`: the rank whose data is taken from now on, or has completed it; -1 for none."""
        self.waited_for = peer

    def enter(self) -> None:
        """Start: send what can be sent, use what has arrived early."""
        raise NotImplementedError

    def advance(self) -> None:
        """Continue local work that was deferred to keep a callback short."""

    def silence(self) -> None:
        """Suppress its warnings and reports: another operation is reported, or no rank is to blame for it."""
        self.warned, self.reported = True, inf

    def put_off(self) -> None:
        """Call `advance` again in the next turn of the loop."""
        if not self._put_off:
            self._put_off = True
            self.comm.call_soon(self._resume)

    def _resume(self) -> None:
        self._put_off = False
        if not self.done:
            self.advance()

    def route(self, peer: int, step: int, offset: int, total: int, length: int) -> memoryview | None:
        """Return memory for `length` arriving bytes of a message; None for a temporary buffer."""
        return None

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Take a segment (None: it was placed); False if this rank does not expect the message."""
        return False

    def sent(self, message: Message, nbytes: int) -> None:
        """`nbytes` more of `message` have been sent, and their memory may be overwritten."""

    def promise(self, peer: int) -> None:
        """Tell `peer` once that this rank has entered and accepts any amount."""
        if peer not in self.promised:
            self.promised |= {peer}
            self.comm.channels[peer].control(FrameKind.GRANT, self.comm.id, self.id)

    def needs(self, peer: int) -> bool:
        """Whether the operation still needs `peer`, which is leaving."""
        raise NotImplementedError

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived, as far as known."""
        return []

    def seek(self) -> None:
        """Open links to the ranks it waits for: they may be unable to open one."""
        for peer in self.awaited() if self.peer is None else [self.peer]:
            if peer != self.comm.rank:
                self.comm.channels[peer].open()

    def describe(self) -> dict[str, Any]:
        """Return this rank's call as plain data, for error messages."""
        return description(
            self.comm.rank, self.signature, self.completion.shape, self.completion.key, self.completion.seq
        )

    def title(self) -> str:
        """Return its op, with its key or number if it has one."""
        name = self.completion.key or self.completion.seq
        return self.completion.op if name is None else f"{self.completion.op} (sequence {name!r})"

    def standing(self) -> str | None:
        """Return a text about what a message waits for; None for a collective, about which the ranks are asked."""
        return None if self.peer is None else f"rank {self.peer} has not taken all of it"

    def algorithm(self) -> str | None:
        """Return the name of its algorithm; None if there is only one, or it is not known yet."""
        return None

    def carriers(self) -> str:
        """Return what carries its bytes, as far as links exist: "shm", "tcp", or several joined by "+"."""
        channels = self.comm.channels
        return carriers_of(channels if self.peer is None else [channels[self.peer]])

    def hangs_here(self) -> bool:
        """Whether it only waits for a device of this rank."""
        return False

    def expire(self) -> None:
        """The timeout has passed."""
        self.comm.stalls.timed_out(self)

    def succeed(self, result: Any) -> None:
        """End successfully."""
        self.done = True
        self.comm.ended(self, None)
        self.completion.finish(result)

    def fail(self, error: BaseException) -> None:
        """End with `error`; no memory of the caller's is used from here on."""
        if not self.done:
            self.done = True
            self.comm.ended(self, error)
            self.comm.divert(self)
            self.completion.finish(None, error)


def carriers_of(channels: Iterable[Channel]) -> str:
    """Return what carries the bytes of channels, as far as links exist: "shm", "tcp", or several joined by "+"."""
    return "+".join(sorted({channel.link.carrier for channel in channels if channel.link is not None}))
