"""What operations need of the group that they are in flight in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiocoll.engine.operations.scratch import Scratch
from aiocoll.errors import GroupError
from aiocoll.runtime import Runtime
from aiocoll.transport.base import Link, SharedMemoryLink
from aiocoll.transport.frame import FrameKind
from aiocoll.transport.shared_memory import RegisteredMemory

__all__ = ["Group", "Looker", "Lookers", "Mismatches", "Sender", "Stalls"]


class Sender(Protocol):
    """The way to one peer.

    Attributes:
        link: None while there is none.
        shared: the link, if it is one through shared memory; also after its end.
    """

    link: Link | None
    shared: SharedMemoryLink | None

    def pass_on(self, operation: Any, index: int, step: int, view: memoryview, total: int) -> bool | None:
        """Send a whole small message at once: True if it has left, False if it will, None if it has to be queued."""

    def kick(self, message: Any) -> None:
        """More of `message` may be sent."""

    def grant(self, operation: Any) -> None:
        """The peer takes all of `operation`."""

    def control(self, kind: FrameKind, group: int, op: int, amount: int = 0) -> None:
        """Send a frame without payload, ahead of the queue."""

    def open(self) -> None:
        """Open the link, if there is none."""

    def drop(self, operation: Any) -> None:
        """Forget what waits of an operation that has ended."""


class Looker(Protocol):
    """An operation that no frame tells of what its peers have put into shared memory."""

    @property
    def comm(self) -> Any:
        """The group it is in flight in."""

    def look(self) -> bool:
        """Do what has become possible; whether anything moved."""


class Lookers(Protocol):
    """Who looks into shared memory.

    Attributes:
        lookers: operations that look whenever there is time.
        readers: operations that look when a peer has written to a slot.
    """

    lookers: dict[Looker, None]
    readers: dict[Looker, None]


class Mismatches(Protocol):
    """What finds out whose call is another one."""

    def disagree(self, peer: int, op: int, mine: dict[str, Any]) -> None:
        """A frame of `peer` does not fit what this rank called."""

    def differ(self, one: dict[str, Any], two: dict[str, Any]) -> None:
        """Two calls do not belong together."""


class Stalls(Protocol):
    """What knows which ranks have not entered an operation."""

    def missing(self, operation: Any) -> tuple[list[int], str]:
        """Say which ranks have not entered, as far as this rank has learnt."""


class Group(Protocol):
    """One rank's part in one group.

    Attributes:
        id: the group on the wire.
        name: of the group.
        rank: this one.
        ranks: rank in the job of each rank of the group.
        others: all ranks but this one.
        left: ranks that have left.
        timeout: seconds an operation may take unless its call says otherwise.
        chunk_nbytes: of the blocks in memory that all ranks share, where they do; else 0.
        small_nbytes: of a small slot in that memory.
        runtime: clock and timers.
        scratch: memory for partial results.
        refused: collectives that have failed without revoking the group.
    """

    id: int
    name: str
    rank: int
    ranks: tuple[int, ...]
    others: list[int]
    left: set[int]
    timeout: float
    chunk_nbytes: int
    small_nbytes: int
    runtime: Runtime
    scratch: Scratch
    refused: set[int | tuple[str, int]]

    @property
    def channels(self) -> Sequence[Sender]:
        """To each rank."""

    @property
    def polling(self) -> Lookers:
        """Who looks into shared memory."""

    @property
    def registered_memory(self) -> RegisteredMemory | None:
        """What peers can read where it lies."""

    @property
    def mismatches(self) -> Mismatches:
        """Finds out whose call is another one."""

    @property
    def stalls(self) -> Stalls:
        """Knows who is missing."""

    def enter(self, operation: Any) -> None:
        """Put an operation in flight."""

    def ended(self, operation: Any, error: BaseException | None) -> None:
        """An operation has ended."""

    def divert(self, operation: Any) -> None:
        """The memory of `operation` is the caller's again."""

    def timed_out(self, operation: Any) -> None:
        """A collective took too long."""

    def broke(self, operation: Any, error: BaseException, what: str = "") -> None:
        """What this rank has to calculate for `operation` has raised `error`."""

    def revoke(self, cause: GroupError) -> None:
        """Fail everything pending with `cause`, on all ranks."""

    def crashed(self, error: Exception) -> None:
        """Code of the library has raised what it should not, while it ran for this group."""

    def stamp(self) -> float:
        """Return the time, as records have it."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call something that runs for the group in the next turn of the loop."""
