"""The interface of a group's origin, which makes further groups of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiocoll.engine.group_spec import GroupSpec
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.store import Store

__all__ = ["Origin"]


class Origin(Protocol):
    """The maker of a group, which can make further groups of its ranks.

    Attributes:
        dry: whether this is a dry run: the other ranks do not exist, and no messages are exchanged.
    """

    dry: bool

    def store(self, identity: int) -> Store:
        """Return a view of the store where the ranks met, restricted to the keys of one group."""

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> Any:
        """Make a group of some of the ranks, which have all agreed to it."""

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Wait for newcomers and assign ranks to them; return the assignment of this rank."""

    async def await_newcomer(self) -> None:
        """Wait until a newcomer has arrived."""

    async def rendezvous_again(
        self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None
    ) -> Any:
        """Meet the other ranks of an assignment within `limit` seconds, and make the group; None is the job's store."""

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Publish to the newcomers of an assignment the reason why the ranks cannot meet."""

    async def release(self) -> None:
        """Release the resources of a closed group."""

    def drop(self, group: Any) -> None:
        """Release an open group whose event loop does not run: close sockets, descriptors and threads at once."""
