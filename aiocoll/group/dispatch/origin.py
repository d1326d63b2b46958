"""The origin of a group, which can make other groups of its ranks, and the specification of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from aiocoll.engine.consensus.completed import Completed
from aiocoll.meeting.growth import Assignment, Invitation
from aiocoll.options import GroupOptions
from aiocoll.store import Store

__all__ = ["GroupSpec", "Origin"]


class GroupSpec(NamedTuple):
    """The properties of a group, besides its ranks.

    Attributes:
        name: the same on all ranks; None numbers groups in the order in which they are made.
        timeout: seconds an operation may take by default.
        options: resolved.
        devices: backend by device.
        completed: of a group made by `shrink`: what the old one had completed on all ranks of this one, and on one of
            them at least.
    """

    name: str | None
    timeout: float
    options: GroupOptions
    devices: Mapping[str, str] = MappingProxyType({"cpu": "aio", "cuda": "aio"})
    completed: tuple[Completed | None, Completed | None] = (None, None)


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
