"""The engine's interfaces that have several implementations, some of them in packages above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from aiocoll.transport.frame import FrameKind, Header
from aiocoll.work import Progress, Work

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.fusion.deferred_work import DeferredWork

__all__ = ["Looker", "Progressive", "Source"]


class Looker(Protocol):
    """An operation that looks for its peers' data in shared memory itself, since no frame announces it."""

    @property
    def comm(self) -> Communicator:
        """The group of the operation."""

    def look(self) -> bool:
        """Do what has become possible; return whether anything moved."""


class Source(Protocol):
    """The receiving side of a channel: that to a peer, or the loopback of a rank's messages to itself.

    Attributes:
        peer: rank of the sender in the job.
    """

    peer: int

    def control(self, kind: FrameKind, group: int, op: int, amount: int = 0) -> None:
        """Send a frame without payload, ahead of the queue."""

    def hold(self, header: Header) -> None:
        """Count a frame that has to wait here."""

    def release(self, header: Header) -> None:
        """Stop counting a frame that has waited here."""


class Progressive(Progress, Protocol):
    """The interface of a block to its deferred works.

    Attributes:
        flushed: the recorded calls have started.
    """

    flushed: bool

    def want(self) -> None:
        """Start the recorded calls, since a caller waits for one of them."""

    def follow(self, work: Work[Any]) -> None:
        """Let the block also wait for `work`."""

    @property
    def failed(self) -> Callable[[DeferredWork], None]:
        """Called with each work that fails."""
