"""Going on with other ranks: fewer by `shrink`, more by `grow`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self

from aiocoll.engine.completed import Completed, report
from aiocoll.engine.diagnosis import cause_of, error_from
from aiocoll.errors import GroupError, RendezvousError, StoreUnavailableError
from aiocoll.group.launch import Timeout
from aiocoll.group.objects import Objects
from aiocoll.meeting.growth import Seat
from aiocoll.options import GroupOptions, seconds
from aiocoll.store import Store

__all__ = ["Origin", "Recovery", "following"]


class Origin(Protocol):
    """What has made a group and can make another of its ranks."""

    def derive(self, identity: int, name: str, ranks: Sequence[int], timeout: float, options: GroupOptions) -> Any:
        """Make a group of some of the ranks, which have agreed on it."""

    async def invite(self, n: int, size: int, name: str, timeout: float) -> Seat:
        """Give `n` newcomers the ranks from `size` on; return this rank's seat among them."""

    async def meet_anew(
        self, seat: Seat, limit: float, timeout: float, options: GroupOptions, store: Store | None = None
    ) -> Any:
        """Meet newcomers, within `limit` seconds, in a world of its own; in `store` if it is not where all met."""

    async def release(self) -> None:
        """A group is closed."""


class Recovery(Objects):
    """The calls that make a new group out of what is left of one, or more of it.

    Attributes:
        completed_everywhere: for a group made by `shrink`, what the old one had completed on all ranks of this one.
        completed_somewhere: what it had completed on one of them at least.
        _devices: backend by device.
    """

    completed_everywhere: Completed | None = None
    completed_somewhere: Completed | None = None
    _origin: Origin
    _devices: Mapping[str, str] = MappingProxyType({"cpu": "aio", "cuda": "aio"})

    def _derive(self, identity: int, name: str, ranks: Sequence[int], timeout: float, options: GroupOptions) -> Self:
        """Make a group of some of the ranks, which have agreed on it, with the same backends."""
        group: Self = self._origin.derive(identity, name, ranks, timeout, options)
        group._devices = self._devices
        return group

    async def shrink(self, exclude: Iterable[int] | None = None, *, assume_dead: Iterable[int] | None = None) -> Self:
        """Make a new group of the ranks that are alive and call this, numbered anew in the same order.

        On a failed group it keeps everybody who lives; on a healthy one, which it revokes, all but `exclude`: what is
        pending on this rank fails, so await it before. The new group works at once, and its `completed_everywhere` and
        `completed_somewhere` tell where to resume. The old one is of no more use: close it at any time.

        Lost ranks that are not proven dead are tried again first, for 2.5 s at most: a connection that was reset costs
        nobody the place. A death is proven by a process of the same host that sees it, or by who started the process.

        Once all living ranks have called it, it takes a few messages. Those that do not call it within 6 s are left
        out, if the others are enough to be sure that no other part of the group goes on: all ranks that are not proven
        dead have to answer, or more than half of all ranks of the group, or half of them with the lowest.

        Cancelling it does not take this rank's word back: it may be counted as a member. Call it again, then, or close
        the group.

        Args:
            exclude: ranks of this group to go on without; give the same on all ranks. Where they differ, a rank is
                out if any that takes part excludes it.
            assume_dead: ranks of this group that are dead by the word of the program, where nobody can prove it: their
                host has lost power, say. **If one of them lives and goes on as well, there are two groups**, each of
                which takes itself for the only one: whatever they write, they write twice.

        Raises:
            PeerLostError: too few ranks could be reached to be sure that the others do not go on by themselves; its
                message and `ranks` name the others.
            GroupError: this rank is out, since it was excluded, was taken for dead, or called too late.
        """
        member = self._member
        excluded = self._others(exclude, "exclude")
        assumed = self._others(assume_dead, "assume_dead")
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
        outcome = await agreement.vote(excluded, assumed, report(member))
        members: list[int] = outcome["members"]
        group = self._derive(
            agreement.identity(members), following(member.name), members, member.timeout, self._options
        )
        group.completed_everywhere = Completed.of(outcome["everywhere"])
        group.completed_somewhere = Completed.of(outcome["somewhere"])
        return group

    def _others(self, ranks: Iterable[int] | None, what: str) -> set[int]:
        """Check ranks to go on without; return them numbered as in the job."""
        member = self._member
        found = {member.ranks[self._check_rank(rank, what)] for rank in ranks or ()}
        if member.endpoint.rank in found:
            raise ValueError(f"{what} names rank {self._rank}, which is calling: a rank that is to go does not shrink")
        return found

    async def grow(self, n: int, timeout: Timeout = None) -> Self:
        """Make a new group of the ranks of this one, which keep their numbers, and `n` newcomers after them.

        All ranks call it; newcomers call ``new_group(join=True)`` with the same ``init_method`` or store, before or
        after. The new group is a world of its own, with its own connections: nothing of an older one is heard in it.
        This one stays as it is: close it when it is no longer needed. A process that takes the place of a lost one
        comes in like this, too: `shrink`, then `grow`.

        Args:
            n: number of newcomers.
            timeout: seconds to wait for them, and then for all to meet; the group's by default.

        Raises:
            RendezvousError: too few came, or not all could meet; this group is as before. Newcomers that came keep
                waiting.
            StoreUnavailableError: the store where the ranks met is gone, so nobody can be found there.
            GroupError: this group has failed; a newcomer with a seat waits for its own timeout then.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be an int, not {type(n).__name__}")
        if n < 1:
            raise ValueError(f"n={n}: give the number of newcomers, at least 1")
        limit = self._member.timeout if timeout is None else seconds(timeout, "timeout")
        asked = await self.allgather_object(n, timeout=limit)
        if len(set(asked)) > 1:
            raise ValueError(f"the ranks of group {self._member.name!r} called grow() with n={asked}: give the same n")
        seat = await self._seat(n, limit)
        return await self._meet_anew(seat, limit, self._member.timeout)

    async def _seat(self, n: int, limit: float) -> Seat:
        """Find the newcomers, or hear from rank 0 that it has; return this rank's seat among them."""
        return await (self._invite(n, limit) if self._rank == 0 else self._invited())

    async def _meet_anew(self, seat: Seat, limit: float, timeout: float, store: Store | None = None) -> Self:
        """Meet the newcomers, unless this group fails: a rank that has died will not come."""
        self._check()
        member = self._member
        meeting = self._loop.create_task(
            self._origin.meet_anew(seat, limit, timeout, self._options, store), name=f"aiocoll growth of {member.name}"
        )

        def stop() -> None:
            meeting.cancel()

        member.on_revoked.append(stop)
        try:
            group: Self = await meeting
            group._devices = self._devices
            return group
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if member.cause is None or task is None or task.cancelling():
                raise
            raise error_from(cause_of(member.cause), member.cause) from member.cause
        finally:
            member.on_revoked.remove(stop)

    async def _invite(self, n: int, limit: float) -> Seat:
        """As rank 0, wait for the newcomers, and tell the others what has come of it."""
        try:
            seat = await self._origin.invite(n, self._size, following(self._member.name), limit)
        except StoreUnavailableError as error:
            text = (
                f"group {self._member.name!r} cannot grow: the store where its ranks met is gone ({error}), so "
                "newcomers do not find it. Start all ranks again, and host the store outside of them: run a "
                "StoreServer in the process that starts them, and give them AIOCOLL_STORE=launcher and its address as "
                "MASTER_ADDR and MASTER_PORT"
            )
            self._tell(text, gone=True)
            raise StoreUnavailableError(text) from error
        except BaseException as error:
            self._tell(f"group {self._member.name!r} did not grow: {str(error) or 'rank 0 was cancelled'}")
            raise
        await self.broadcast_object({"seat": list(seat)}, 0)
        return seat

    def _tell(self, text: str, gone: bool = False) -> None:
        """Let the other ranks raise it, too, unless the group has failed: then they know."""
        with contextlib.suppress(GroupError):
            self.broadcast_object({"error": text, "gone": gone}, 0)

    async def _invited(self) -> Seat:
        # Rank 0 keeps the time, and its death or a failure of the group ends this.
        told = await self.broadcast_object(None, 0, timeout=float("inf"))
        if "error" in told:
            raise (StoreUnavailableError if told["gone"] else RendezvousError)(told["error"])
        seat = Seat(*told["seat"])
        return seat._replace(rank=seat.rank + self._rank)


def following(name: str) -> str:
    """Return the name of the group that comes after the one called `name`."""
    first, _, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if first and number.isdecimal() else f"{name}~1"
