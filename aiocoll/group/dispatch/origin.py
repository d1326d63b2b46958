"""The origin of a group, which can make other groups of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiocoll.engine.group_spec import GroupSpec
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.store import Store

__all__ = ["Origin"]


class Origin(Protocol):
    """Has made a group, and can make another one of its ranks.

    Attributes:
        dry: the other ranks do not exist: they are neither told nor waited for.
    """

    dry: bool

    def store(self, identity: int) -> Store:
        """Return the keys of a group in the store where its ranks met."""

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> Any:
        """Make a group of some of the ranks, all of which have agreed to it."""

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Assign ranks to newcomers; return this rank's assignment among them."""

    async def await_newcomer(self) -> None:
        """Wait until there is a newcomer."""

    async def meet_anew(self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None) -> Any:
        """Meet newcomers, within `limit` seconds, in a world of its own; in `store` if it is not where all met."""

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Publish to newcomers of the same world why the ranks cannot meet."""

    async def release(self) -> None:
        """A group is closed."""

    def drop(self, group: Any) -> None:
        """As `release`, of an open group whose event loop does not run: close sockets, descriptors and threads now."""
