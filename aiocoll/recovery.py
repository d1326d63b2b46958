"""Going on after a failure: fewer ranks by `shrink`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

from aiocoll.engine.completed import Completed, report
from aiocoll.errors import GroupError
from aiocoll.launch import Launcher
from aiocoll.options import GroupOptions

__all__ = ["Origin", "Recovery"]


class Origin(Protocol):
    """What has made a group and can make another of its ranks."""

    def derive(self, identity: int, name: str, ranks: Sequence[int], timeout: float, options: GroupOptions) -> Any:
        """Make a group of some of the ranks, which have agreed on it."""

    async def release(self) -> None:
        """A group is closed."""


class Recovery(Launcher):
    """The calls that make a new group out of what is left of one, or more of it.

    Attributes:
        completed_everywhere: for a group made by `shrink`, what the old one had completed on all ranks of this one.
        completed_somewhere: what it had completed on one of them at least.
    """

    completed_everywhere: Completed | None = None
    completed_somewhere: Completed | None = None
    _origin: Origin

    async def shrink(self, exclude: Iterable[int] | None = None) -> Self:
        """Make a new group of the ranks that are alive and call this, numbered anew in the same order.

        On a failed group it keeps everybody who lives; on a healthy one, which it revokes, all but `exclude`: what is
        pending on this rank fails, so await it before. The new group works at once, and its `completed_everywhere` and
        `completed_somewhere` tell where to resume. The old one is of no more use: close it at any time.

        Once all living ranks have called it, it takes a few messages. Those that do not call it within 6 s are left
        out, if the others are more than half of all that are not proven dead, or half of them with the lowest.

        Cancelling it does not take this rank's word back: it may be counted as a member. Call it again, then, or close
        the group.

        Args:
            exclude: ranks of this group to go on without; give the same on all ranks. Where they differ, a rank is
                out if any that takes part excludes it.

        Raises:
            PeerLostError: too few ranks could be reached to be sure that the others do not go on by themselves; its
                message and `ranks` name the others.
            GroupError: this rank is out, since it was excluded, was taken for dead, or called too late.
        """
        member = self._member
        excluded = {member.ranks[self._check_rank(rank, "exclude")] for rank in exclude or ()}
        if member.endpoint.rank in excluded:
            raise ValueError(f"exclude names rank {self._rank}, which is calling: a rank that is to go does not shrink")
        self._check_owner()
        agreement = member.endpoint.agreement(member.id, member.ranks)
        if agreement.taken:
            raise GroupError(
                f"group {member.name!r} was shrunk before on rank {self._rank}: shrink the group that came of it",
                group=member.name,
            )
        member.revoke(
            GroupError(
                f"group {member.name!r} was given up by rank {self._rank}, which called shrink()",
                group=member.name,
                ranks=[self._rank],
            ),
            # The others may still be completing what is complete here; what is not will not be complete there.
            tell=bool(member.pending),
        )
        outcome = await agreement.vote(excluded, report(member))
        members: list[int] = outcome["members"]
        group: Self = self._origin.derive(
            agreement.identity(members), _following(member.name), members, member.timeout, self._options
        )
        group.completed_everywhere = Completed.of(outcome["everywhere"])
        group.completed_somewhere = Completed.of(outcome["somewhere"])
        return group


def _following(name: str) -> str:
    """Return the name of the group that comes after the one called `name`."""
    first, _, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if first and number.isdecimal() else f"{name}~1"
