"""An operation in flight: `enter`, `advance`, `fail`; and the message, its unit of sending."""

from __future__ import annotations

from math import inf
from typing import Any

from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.signature import Signature, description
from aiocoll.transport.frame import FrameKind
from aiocoll.work import Work

__all__ = ["NOBODY", "Announced", "Message", "Operation"]

NOBODY: frozenset[int] = frozenset()


class Message:
    """What an operation sends to one peer in one step.

    Attributes:
        operation: its owner, told by `sent(message, nbytes)` when bytes have left.
        index: which action of the owner it is.
        view: the bytes, `total` of them.
        limit: how many may be sent by now.
        moved: how many have been handed to the link.
        queued: it is in the channel's queue.
        blocked: it waits for a grant.
        announces: if nothing of it may be sent yet, the receiver is told that it will come.
        batch: what the receiver is told then of the batch it is part of.
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
    """A message whose receiver hears of it before there is anything to send, so that none overtakes it."""

    __slots__ = ("batch",)

    announces = True

    def __init__(self, operation: Operation, step: int, view: memoryview, batch: int) -> None:
        super().__init__(operation, 0, step, view, 0)
        self.batch = batch


class Operation:
    """Base of everything a group has in flight.

    Args:
        comm: this rank's part in the group.
        identity: 64 bits that name it on the wire; see `aiocoll.transport.frame`.
        signature: what the ranks must agree on.
        fingerprint: hash of that.
        work: the caller's handle, or the parent's of a child; with the timeout.

    Attributes:
        comm, id, signature, fingerprint, work: as given.
        parent: the operation that it is a part of; None of one that a call has started.
        entered: when it was entered, on the runtime's clock.
        entry: what is recorded of it from then on; see `aiocoll.engine.operations.operation_log`.
        peer: of a message, the other rank; None of a receive from any rank.
        timeout: seconds until `expire`; at first the work's.
        reported: when it is due to be reported again; 0 before it has been for the first time.
        granted: peers that have entered it and take any amount.
        promised: peers that have been told so by this rank.
    """

    peer: int | None = None
    entry: list[Any]

    __slots__ = (
        "_put_off",
        "comm",
        "done",
        "entered",
        "entry",
        "fingerprint",
        "granted",
        "id",
        "parent",
        "promised",
        "reported",
        "signature",
        "timeout",
        "warned",
        "work",
    )

    def __init__(
        self,
        comm: Group,
        identity: int,
        signature: Signature,
        fingerprint: int,
        work: Work[Any],
    ) -> None:
        self.comm = comm
        self.id = identity
        self.signature = signature
        self.fingerprint = fingerprint
        self.work = work
        self.parent: Operation | None = None
        self.timeout = work._timeout
        self.entered = 0.0
        self.done = False
        self.warned = False
        self.reported = 0.0
        self.granted = NOBODY
        self.promised = NOBODY
        self._put_off = False

    def enter(self) -> None:
        """Start: send what can be sent, take what has arrived early."""
        raise NotImplementedError

    def advance(self) -> None:
        """Go on with local work that was put off to keep a callback short."""

    def silence(self) -> None:
        """Have it neither warned of nor reported: another one is, or nobody is to blame for it."""
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
        """Name the memory for `length` bytes of a message that are arriving; None for a temporary place."""
        return None

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Take a segment (None: it was placed); False if the message is not one this rank expects."""
        return False

    def sent(self, message: Message, nbytes: int) -> None:
        """`nbytes` more of `message` have left and their memory may be overwritten."""

    def promise(self, peer: int) -> None:
        """Tell `peer` once that this rank has entered and takes any amount."""
        if peer not in self.promised:
            self.promised |= {peer}
            self.comm.channels[peer].control(FrameKind.GRANT, self.comm.id, self.id)

    def needs(self, peer: int) -> bool:
        """Whether the operation still waits for `peer`, which is about to be gone."""
        raise NotImplementedError

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived, as far as that is known."""
        return []

    def seek(self) -> None:
        """Open links to the ranks it waits for: it may be that they cannot open one, and this rank can."""
        for peer in self.awaited() if self.peer is None else [self.peer]:
            if peer != self.comm.rank:
                self.comm.channels[peer].open()

    def describe(self) -> dict[str, Any]:
        """Say in plain data what this rank called, for error messages."""
        return description(self.comm.rank, self.signature, self.work._shape, self.work.key, self.work.seq)

    def title(self) -> str:
        """Return its op, and its key or number if it has one."""
        name = self.work.key or self.work.seq
        return self.work.op if name is None else f"{self.work.op} (sequence {name!r})"

    def standing(self) -> str | None:
        """Say what a message waits for; None of a collective, of which the ranks are asked."""
        return None if self.peer is None else f"rank {self.peer} has not taken all of it"

    def algorithm(self) -> str | None:
        """Return the name of what carries it out; None where there is only one way, or that is not known yet."""
        return None

    def carriers(self) -> str:
        """Return what carries its bytes, as far as there are links: "shm", "tcp", or several with "+" between."""
        channels = self.comm.channels
        used = channels if self.peer is None else [channels[self.peer]]
        return "+".join(sorted({channel.link.carrier for channel in used if channel.link is not None}))

    def hangs_here(self) -> bool:
        """Whether it waits for nothing but a device of this rank."""
        return False

    def expire(self) -> None:
        """The timeout has passed."""
        self.comm.timed_out(self)

    def succeed(self, result: Any) -> None:
        """End well."""
        self.done = True
        self.comm.ended(self, None)
        self.work._finish(result)

    def fail(self, error: BaseException) -> None:
        """End with `error`; nothing of the caller's is touched from here on."""
        if not self.done:
            self.done = True
            self.comm.ended(self, error)
            self.comm.divert(self)
            self.work._finish(None, error)
