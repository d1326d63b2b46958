"""What operations need of their group, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiocoll.algorithms.machine import Tuning
from aiocoll.engine.job.context import Context
from aiocoll.engine.operations.scratch import Scratch
from aiocoll.errors import GroupError
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Link, SharedMemoryLink
from aiocoll.transport.frame import FrameKind
from aiocoll.transport.shared_memory import RegisteredMemory

__all__ = ["Group", "Looker", "Lookers", "Mismatches", "Sender", "Stalls"]


class Sender(Protocol):
    """The channel to one peer.

    Attributes:
        link: None while there is none.
        shared: the link, if it is one through shared memory; also after its end.
    """

    link: Link | None
    shared: SharedMemoryLink | None

    def pass_on(self, operation: Any, index: int, step: int, view: memoryview, total: int) -> bool | None:
        """Send a whole small message at once: True if it was sent, False if it will be, None if it has to be queued."""

    def kick(self, message: Any) -> None:
        """More of `message` may be sent."""

    def grant(self, operation: Any) -> None:
        """The peer accepts all of `operation`."""

    def control(self, kind: FrameKind, group: int, op: int, amount: int = 0) -> None:
        """Send a frame without payload, ahead of the queue."""

    def open(self) -> None:
        """Open the link, if there is none."""

    def drop(self, operation: Any) -> None:
        """Forget the blocked messages of an operation that has ended."""


class Looker(Protocol):
    """An operation that has to look for its peers' data in shared memory itself: no frame announces it."""

    @property
    def comm(self) -> Any:
        """The group of the operation."""

    def look(self) -> bool:
        """Do what has become possible; return whether anything moved."""


class Lookers(Protocol):
    """The operations that look into shared memory.

    Attributes:
        lookers: those that look whenever there is time.
        readers: those that look when a peer has posted to a slot.
    """

    lookers: dict[Looker, None]
    readers: dict[Looker, None]


class Mismatches(Protocol):
    """Finds out which ranks' calls do not match."""

    def disagree(self, peer: int, op: int, mine: dict[str, Any]) -> None:
        """A frame of `peer` does not match this rank's call."""

    def differ(self, one: dict[str, Any], two: dict[str, Any]) -> None:
        """Two calls do not match."""


class Stalls(Protocol):
    """Knows which ranks have not entered an operation."""

    def missing(self, operation: Any) -> tuple[list[int], str]:
        """Return the ranks that have not entered, as far as this rank knows, and a text about them."""


class Group(Protocol):
    """One rank's part in one group.

    Attributes:
        context: of the endpoint.
        id: id of the group on the wire.
        name: of the group.
        rank: this one.
        ranks: rank in the job of each rank of the group.
        others: all ranks but this one.
        left: ranks that have closed the group.
        timeout: default timeout of an operation, in seconds.
        chunk_nbytes: size of a chunk in shared memory if all ranks share memory; else 0.
        tuning: measured speed of the machine.
        runtime: clock and timers.
        scratch: memory for partial results.
        refused: collectives that failed without revoking the group.
    """

    context: Context
    id: int
    name: str
    rank: int
    ranks: tuple[int, ...]
    others: list[int]
    left: set[int]
    timeout: float
    chunk_nbytes: int
    tuning: Tuning
    runtime: Runtime
    scratch: Scratch
    refused: set[int | tuple[str, int]]

    @property
    def channels(self) -> Sequence[Sender]:
        """The channel to each rank."""

    @property
    def slots(self) -> Any:
        """Slots of the group's ranks."""

    @property
    def polling(self) -> Lookers:
        """The operations that look into shared memory."""

    @property
    def registered_memory(self) -> RegisteredMemory | None:
        """Memory that peers can read in place."""

    @property
    def mismatches(self) -> Mismatches:
        """Finds out which ranks' calls do not match."""

    @property
    def stalls(self) -> Stalls:
        """Knows which ranks are missing."""

    def enter(self, operation: Any) -> None:
        """Put an operation in flight."""

    def ended(self, operation: Any, error: BaseException | None) -> None:
        """An operation has ended."""

    def divert(self, operation: Any) -> None:
        """Stop receiving into the memory of `operation`: it belongs to the caller again."""

    def timed_out(self, operation: Any) -> None:
        """A collective timed out."""

    def broke(self, operation: Any, error: BaseException, what: str = "") -> None:
        """A calculation of `operation` on this rank has raised `error`."""

    def revoke(self, cause: GroupError) -> None:
        """Fail everything pending with `cause`, on all ranks."""

    def crashed(self, error: Exception) -> None:
        """Code of the library has raised an unexpected error while working for this group."""

    def stamp(self) -> float:
        """Return the time, as used in records."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call something on behalf of the group in the next turn of the loop."""
