"""The engine's interfaces that have several implementations, some of them in packages above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiocoll.completion import Completion, Progress

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.fusion.deferred_completion import DeferredCompletion

__all__ = ["Looker", "Progressive"]


class Looker(Protocol):
    """An operation that looks for its peers' data in shared memory itself, since no frame announces it."""

    @property
    def comm(self) -> Communicator:
        """The group of the operation."""

    def look(self) -> bool:
        """Do what has become possible; return whether anything moved."""


class Progressive(Progress, Protocol):
    """The interface of a block to its deferred completions.

    Attributes:
        flushed: the recorded calls have started.
    """

    flushed: bool

    def want(self) -> None:
        """Start the recorded calls, since a caller waits for one of them."""

    def follow(self, completion: Completion) -> None:
        """Let the block also wait for `completion`."""

    @property
    def failed(self) -> Callable[[DeferredCompletion], None]:
        """Called with each completion that fails."""
