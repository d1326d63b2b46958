"""Origin of a group: the interface of the job that made the group, and can make further groups of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiocoll.engine.group_spec import GroupSpec
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.store import Store

__all__ = ["Origin"]


class Origin(Protocol):
    """The part of a job that made a group, and can make further groups of its ranks.

    Attributes:
        dry: whether this is a dry run: the other ranks do not exist, and no messages are exchanged.
    """

    dry: bool

    def store(self, identity: int) -> Store:
        """Return a view of the store where the ranks met that contains only one group's keys."""

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> Any:
        """Make a group of `ranks`, which must all do the same."""

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Wait for newcomers and assign ranks to them; return the assignment of this rank."""

    async def await_newcomer(self) -> None:
        """Wait until a process has requested to join."""

    async def rendezvous_again(
        self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None
    ) -> Any:
        """Meet the other ranks of an assignment within `limit` seconds in `store` (None: the job's); make the group."""

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Publish to the newcomers of an assignment the reason why the ranks cannot meet them."""

    async def release(self) -> None:
        """Release the resources of a closed group."""

    def drop(self, group: Any) -> None:
        """Release an open group whose event loop is not running: close sockets, descriptors and threads immediately."""
