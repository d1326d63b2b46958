"""Interfaces of the engine that several classes implement, some of them in higher layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiocoll.completion import Completion, Progress

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.engine.fusion.deferred_completion import DeferredCompletion

__all__ = ["Looker", "Progressive"]


class Looker(Protocol):
    """An operation that must look for its peers' data in shared memory, because no frame announces the data."""

    @property
    def comm(self) -> Communicator:
        """The communicator of the operation."""

    def look(self) -> bool:
        """Process all data that has arrived; return whether any data had arrived."""


class Progressive(Progress, Protocol):
    """The interface of a coalescing block that its deferred completions use.

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
        """Return the callback that reports a failed call to the block."""
