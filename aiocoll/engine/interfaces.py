"""Interfaces of the engine that have several implementations, some in higher layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiocoll.completion import Completion, Progress

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.fusion.deferred_completion import DeferredCompletion

__all__ = ["Looker", "Progressive"]


class Looker(Protocol):
    """An operation that reads its peers' data from shared memory itself, since no frame announces the data."""

    @property
    def comm(self) -> Communicator:
        """Return the operation's group."""

    def look(self) -> bool:
        """Make all progress that is possible; return whether there was any."""


class Progressive(Progress, Protocol):
    """Interface of a block to its deferred completions.

    Attributes:
        flushed: whether the recorded calls have started.
    """

    flushed: bool

    def start_if_held(self) -> None:
        """Start the recorded calls, since a caller waits for one of them."""

    def follow(self, completion: Completion) -> None:
        """Let the block also wait for `completion`."""

    @property
    def failed(self) -> Callable[[DeferredCompletion], None]:
        """Return the callback for each completion that fails."""
