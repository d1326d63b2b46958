"""`Origin`: the interface by which a group makes further groups in its job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiocoll.engine.group_spec import GroupSpec
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.store import Store

__all__ = ["Origin"]


class Origin(Protocol):
    """The interface of the job that made a group. It makes further groups of the job's ranks.

    Attributes:
        dry: whether this is a dry run: the other ranks do not exist, and no messages are exchanged.
    """

    dry: bool

    def store(self, identity: int) -> Store:
        """Return a view of the rendezvous store that contains only one group's keys."""

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> Any:
        """Make a group of `ranks`. Each of these ranks must make the same call."""

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Wait for newcomers and assign ranks to them; return the assignment of this rank."""

    async def await_newcomer(self) -> None:
        """Wait until a process has requested to join."""

    async def rendezvous_again(
        self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None
    ) -> Any:
        """Meet an assignment's ranks within `limit` seconds, by default in the job's store, and make their group."""

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Notify the newcomers of an assignment that the ranks cannot meet them, and publish the reason."""

    async def release(self) -> None:
        """Release the resources of a closed group."""

    def drop(self, group: Any) -> None:
        """Release an open group whose event loop is not running: close sockets, descriptors and threads immediately."""
